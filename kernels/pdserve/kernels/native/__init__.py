"""Paged decode attention in C++, compiled when pdserve is installed where there is a compiler.

Nothing here is needed: without the compiled library, `pdserve.kernels.torch_attention` computes the same.
"""
