"""Simulates a stack on a trace of prompts, by a dry run of the code that serves."""
