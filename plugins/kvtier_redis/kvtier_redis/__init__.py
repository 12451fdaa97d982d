"""A kvtier store tier on Redis or Valkey."""
