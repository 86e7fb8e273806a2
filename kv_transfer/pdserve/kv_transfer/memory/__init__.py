"""Memory that KV blocks are read from and written to."""
