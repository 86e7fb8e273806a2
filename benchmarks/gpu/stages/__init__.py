"""Stages: one module each, with a function `run(bench)`."""
