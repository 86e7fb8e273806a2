"""Paged decode attention, and products with LoRA adapters and int8 matrices, in C++: compiled at installation where a compiler is.

Nothing here is needed: without the compiled library, `pdserve.kernels.attention.torch_attention`,
`pdserve.kernels.lora.torch_lora` and `pdserve.kernels.int8_linear` compute the same.
"""
