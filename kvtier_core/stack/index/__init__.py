"""The chunks that a tier holds, their dependencies, and the order in which they may be evicted."""
