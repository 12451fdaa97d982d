"""What a stack would have done with a trace of prompts: a dry run of the code that serves."""
