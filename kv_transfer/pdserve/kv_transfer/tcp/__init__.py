"""The TCP connector."""
