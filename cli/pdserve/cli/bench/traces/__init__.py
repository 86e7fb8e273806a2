"""Traces that others recorded: readers of their formats, and prompts for what they say of texts."""
