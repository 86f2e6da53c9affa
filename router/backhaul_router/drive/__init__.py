"""Performs what turns need, over real engines: the embedded router."""
