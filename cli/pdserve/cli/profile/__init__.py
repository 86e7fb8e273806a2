"""`pdserve profile`: what a worker's steps, transfers and start take here, for `pdserve simulate`."""
