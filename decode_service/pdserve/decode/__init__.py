"""The decode role: receives KV blocks, or prefills itself, and streams tokens."""
