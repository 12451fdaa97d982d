"""What a store has that nobody here knows, and whether that is worth loading."""
