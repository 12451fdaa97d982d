"""Moves bytes: pages to slots and back, many files at once, and the threads that do it. Knows no keys."""
