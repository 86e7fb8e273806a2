"""Processes: the environment, the answers and the end of children, and the end of a service."""
