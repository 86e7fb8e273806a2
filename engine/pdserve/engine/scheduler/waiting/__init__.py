"""Sequences that wait for their first or next step, and the order in which steps try them."""
