"""Repository of conversations' handles: in memory, or in Redis or Valkey for several routers."""
