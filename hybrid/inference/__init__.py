"""Generation: sequences, KV blocks, the scheduler, the runner, the sampler and the generator that joins them."""
