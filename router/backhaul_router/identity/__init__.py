"""Which conversation a request belongs to, and for which tenant. No I/O."""
