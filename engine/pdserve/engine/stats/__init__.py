"""Statistics of steps and requests, and the loggers that get them."""
