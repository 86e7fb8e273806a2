"""`pdserve up`: the plan of a cluster, its processes and ports, and what it prints."""
