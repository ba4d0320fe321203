"""Running quantized heads: the base model, the speculative loop, and continuous batching."""
