"""Moves bytes: pages to slots and back, many files at once; the threads that do it, and folders. Knows no keys."""
