"""Lossy codecs for what a kvtier store tier keeps: fp8, int8, KIVI and CacheGen."""
