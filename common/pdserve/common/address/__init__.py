"""Addresses, URLs and descriptors."""
