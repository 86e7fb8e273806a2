"""States of layers that keep a fixed number of numbers per sequence."""
