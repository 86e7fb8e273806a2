"""Triton kernels. Each module has the kernels of one operation and a launcher that checks shapes.

Nothing outside this folder imports it but the choosers `make_layer_ops.py` and `make_attention.py`, and those only where a GPU is
used: CPU services never import Triton. Kernels are written for Triton 3.6 to 3.9 and for its interpreter: numbers are
converted to float32 right after each load, and no kernel uses autotuning, inline assembly or libdevice.
"""
