"""Attempts: one placement of a prompt, its calls to workers, and the meaning of their failures."""
