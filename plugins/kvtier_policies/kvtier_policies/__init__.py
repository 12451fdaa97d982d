"""Eviction policies to compare with those of the core: arc, fifo, lfu, lru2, mru, s3fifo, tournament."""
