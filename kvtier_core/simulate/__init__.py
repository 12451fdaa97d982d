"""What a stack would have done with a trace of prompts: the code that serves, without its bytes."""
