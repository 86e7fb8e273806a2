"""Paged decode attention and LoRA products in C++, compiled when pdserve is installed where there is a compiler.

Nothing here is needed: without the compiled library, `pdserve.kernels.torch_attention` and `pdserve.kernels.torch_lora` compute the
same.
"""
