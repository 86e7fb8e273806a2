"""The router's view of workers: discovery, watches, load, and cached blocks."""
