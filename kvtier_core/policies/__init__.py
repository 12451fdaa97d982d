"""The eviction policies that the core ships, offered through the same hooks as those of other plugins."""
