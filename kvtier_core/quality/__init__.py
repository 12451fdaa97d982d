"""How far answers behind a lossy codec differ: prompts, statistics, and the report that opens a tier."""
