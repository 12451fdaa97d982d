"""The common parts of stores, ours and others': folders and locks, files and disks, facts, shared capacity."""
