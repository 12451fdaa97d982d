"""An observer of kvtier: a line for each store in trouble."""
