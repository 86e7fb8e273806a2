"""Workers of `pdserve up --ray` on the nodes of a Ray cluster."""
