"""Bundles, files of frames that travel: a kvtier store tier that reads one, and the commands export and import."""
