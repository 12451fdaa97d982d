"""`kvtier serve`: one stack for all engines of a node, in a process of its own, and its client in each engine."""
