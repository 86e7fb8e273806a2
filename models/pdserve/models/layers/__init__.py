"""Layers that model families compose."""
