"""The process around an engine: threads, queues, KV transfer manager, health, drain. Both roles are composed from it."""
