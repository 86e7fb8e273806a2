"""The product's own router, workers and engines under virtual time; only the time of a step and of a transfer is modelled."""
