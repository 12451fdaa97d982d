"""An eviction policy of kvtier: least recently used."""
