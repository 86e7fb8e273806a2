"""The engine: scheduler, KV cache, model runner, sampler. Works on token ids, without network and without roles."""
