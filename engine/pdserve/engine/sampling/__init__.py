"""Sampling of tokens from logits: processors, kept sets, noise, log-probabilities."""
