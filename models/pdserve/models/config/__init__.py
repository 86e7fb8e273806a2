"""A model's `config.json`: its fields, their limits, and the values that the decoder computes with."""
