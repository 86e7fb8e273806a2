"""The engine: scheduler, KV cache, model runner, sampler. Speaks token ids; knows no network and no roles."""
