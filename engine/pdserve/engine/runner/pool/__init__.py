"""The size of the KV block pool, from memory and settings."""
