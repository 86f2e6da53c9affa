"""I/O to engines: their HTTP client, and what is asked of them besides turns."""
