"""The frame: the one shape of a chunk outside the engine, and how it is encoded, sealed and verified."""
