"""A worker's transfers, on the side of its engine."""
