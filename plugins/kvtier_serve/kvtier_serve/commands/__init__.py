"""`kvtier serve`, and its actions on a running server."""
