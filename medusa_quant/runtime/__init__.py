"""The speculative loop: base model, heads, trees, verification, continuous batching."""
