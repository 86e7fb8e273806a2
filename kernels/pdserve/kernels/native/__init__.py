"""Paged attention, products with LoRA adapters and int8 matrices, mixtures of experts and steps of states in C++: compiled at
installation where a compiler is.

Nothing here is needed: without the compiled library, `pdserve.kernels.attention.torch_attention`,
`pdserve.kernels.lora.torch_lora`, `pdserve.kernels.cpu.int8_linear`, `pdserve.kernels.layers.experts` and
`pdserve.kernels.state.state_backend` compute the same.
"""
