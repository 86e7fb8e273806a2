"""Which tokens a step computes: waiting queues, running batch, step results, remote KV."""
