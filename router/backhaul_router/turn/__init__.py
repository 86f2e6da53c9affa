"""One turn as a state machine: what to ask which engine next, and what follows. No I/O, no clock."""
