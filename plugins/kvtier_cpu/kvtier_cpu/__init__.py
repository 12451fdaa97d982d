"""A kvtier tier in this node's memory."""
