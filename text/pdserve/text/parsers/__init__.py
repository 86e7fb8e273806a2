"""Parsers of a chat's answer: reasoning and calls of tools, found in the text as it streams."""
