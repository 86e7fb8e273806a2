"""Tokens to texts: detokenizer, stop strings and log-probabilities, which `OutputProcessor` brings together."""
