"""Lookups of a path: chunks that are READY are pinned, those in stores are requested."""
