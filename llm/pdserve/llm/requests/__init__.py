"""Requests of the Python API: from a caller's prompts and parameters to the engine, and their outputs back."""
