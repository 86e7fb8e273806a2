"""Attention over the paged KV cache in Triton kernels."""
