"""KV cache blocks: the pool, prefix cache and pins."""
