"""Measurements that the `backhaul` command makes: `backhaul bench ttft`, and the clusters that it and the demo run on."""
