"""vLLM's requests: what their KV depends on besides their tokens, and how the scheduler side sees them."""
