"""Threads that work for the owner, and the memory that they reuse."""
