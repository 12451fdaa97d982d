"""A kvtier store tier on a local disk."""
