"""The ranks of a tensor-parallel engine: their processes, messages and common operations."""
