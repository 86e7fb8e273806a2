"""Drafts in the model runner: what becomes of them in a step, and the next ones."""
