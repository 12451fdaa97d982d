"""How far answers differ when prefixes come back through a lossy codec: prompts, engines, statistics."""
