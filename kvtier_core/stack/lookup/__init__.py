"""What a stack has of a path: pinned where it is READY, requested where it lies below."""
