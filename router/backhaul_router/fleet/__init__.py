"""The engines as the router knows them: load, costs, breakers, restarts, retained KV. No I/O, no clock."""
