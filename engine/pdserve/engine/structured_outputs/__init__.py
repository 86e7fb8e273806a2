"""Grammars: compiled and matched in processes of their own, and their bitmasks."""
