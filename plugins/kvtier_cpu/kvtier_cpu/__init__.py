"""A kvtier arena in this node's memory."""
