"""What any inference engine needs of kvtier. Knows no engine's own classes."""
