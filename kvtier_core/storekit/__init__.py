"""The parts that stores share, ours and others': folders and locks, files and disks, facts, shared capacity."""
