"""Paged decode attention, products with LoRA adapters and int8 matrices, and mixtures of experts, in C++: compiled at installation
where a compiler is.

Nothing here is needed: without the compiled library, `pdserve.kernels.attention.torch_attention`,
`pdserve.kernels.lora.torch_lora`, `pdserve.kernels.cpu.int8_linear` and `pdserve.kernels.layers.experts` compute the same.
"""
