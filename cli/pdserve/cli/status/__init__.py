"""`pdserve top` and `pdserve trace`: a router's status in the terminal."""
