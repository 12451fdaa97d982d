"""Simulates what a stack would have done with a trace of prompts, by a dry run of the code that serves."""
