"""Moves bytes: pages to slots and back, many files at once. Knows no keys."""
