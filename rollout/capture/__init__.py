"""The capture inside vLLM's worker: hooks on the sampler, one core for every runner and device."""
