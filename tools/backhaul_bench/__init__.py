"""Benchmarks: what `backhaul bench` measures, and the clusters that it and the demo run on."""
