"""An arena of kvtier in memory that the engine's workers map."""
