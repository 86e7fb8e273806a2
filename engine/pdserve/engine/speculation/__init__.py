"""Speculation: drafters, and what of a draft the model confirms."""
