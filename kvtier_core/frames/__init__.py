"""The frame: the only form of a chunk outside the engine, and how it is sealed and verified."""
