"""Executors: compute the scheduler's steps, on one device or on several ranks."""
