"""Tensor operations of a decoder step over a paged KV cache. Imports nothing else of pdserve.

Letters used in every docstring: `T` tokens of the step, `B` sequences, `S` keys that a row looks at, `H` hidden size,
`Hq` query heads, `Hkv` key and value heads, `G = Hq / Hkv`, `D` head size, `L` layers, `bs` tokens in a block, `E` experts of a
layer, `k` experts per token, `I` inner size of an MLP or expert.
"""
