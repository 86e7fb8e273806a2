"""Matrices that a checkpoint stores in fewer bits, next to their scales: each form, and how it is widened."""
