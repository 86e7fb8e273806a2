"""Transfers between workers whose ranks share the KV heads: which part of a block moves from which rank to which."""
