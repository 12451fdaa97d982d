"""Real servers that tests start, and end."""
