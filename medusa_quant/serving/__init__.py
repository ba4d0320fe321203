"""An OpenAI-compatible server over `Engine`. Needs the `serve` extra."""
