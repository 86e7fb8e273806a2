"""The scheduler: waiting queues, running batch, step results, remote KV."""
