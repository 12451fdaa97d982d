"""The data plane: the ordered stack of tiers. Does not know that plugins exist."""
