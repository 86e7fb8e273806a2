"""Reading blocks: queues, connections, grants and digests, without a transport."""
