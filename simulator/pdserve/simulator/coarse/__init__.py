"""The coarse mode of a simulation: batches in place of sequences, for thousands of workers."""
