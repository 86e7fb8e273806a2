"""Attempts: one placement of a prompt, its calls to workers, and what their failures mean."""
