"""`kvtier serve`: one stack for all engines of a node, in its own process."""
