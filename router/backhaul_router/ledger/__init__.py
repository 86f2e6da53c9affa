"""Where conversations' handles are on file: in memory, or in Redis or Valkey for several routers."""
