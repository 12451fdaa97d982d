"""Backends in front of a backend: names in place of keys, and reads of peers between the calls of a tier."""
