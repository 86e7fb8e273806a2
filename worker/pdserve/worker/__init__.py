"""The process around an engine: threads, queues, the seam adapter, health, drain. Both roles are compositions of it."""
