"""What the KV of a vLLM request depends on besides its tokens."""
