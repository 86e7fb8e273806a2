"""From settings and a model folder to a model runner: weights, KV pool and their limits."""
