"""The command `backhaul`."""
