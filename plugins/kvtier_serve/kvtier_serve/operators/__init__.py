"""What operators see of a server, and do to it: over HTTP, on a thread of its own."""
