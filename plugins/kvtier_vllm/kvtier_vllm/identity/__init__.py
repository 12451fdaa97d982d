"""Which vLLM engines may share KV."""
