"""A token database of kvtier: SHA-256."""
