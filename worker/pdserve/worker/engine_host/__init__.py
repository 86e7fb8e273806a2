"""The side of a worker that uses the pool of KV blocks: engine, transfers and connectors, in this process or in one of its own."""
