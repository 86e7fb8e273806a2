"""Transfers of a tensor-parallel worker: each rank's process moves its own part of the blocks; rank 0 says which."""
