"""Identifies the weights that an engine serves, whatever the engine."""
