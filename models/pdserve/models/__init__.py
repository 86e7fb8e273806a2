"""Decoder-only models: configuration, weights, and the forward pass over a paged KV cache."""
