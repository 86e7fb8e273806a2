"""The prefill role: computes prompts and keeps their KV blocks for one transfer each."""
