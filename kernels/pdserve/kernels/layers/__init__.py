"""Layers of a decoder made of matrix products and of `LayerOps`."""
