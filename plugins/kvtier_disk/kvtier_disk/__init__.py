"""A kvtier tier on a local disk."""
