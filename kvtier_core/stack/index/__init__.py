"""Which chunks a tier holds, how they depend on each other, and in which order they may be evicted."""
