"""A tier below the arenas: an index of the frames in a backend, and the guards around it."""
