"""`pdserve plan`: the fleet that a load needs."""
