"""Processes: the environment and the answers of children, and the end of a service."""
