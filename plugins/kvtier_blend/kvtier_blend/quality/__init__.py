"""How far answers differ when prompts are blended: prompts of several documents, engines, the command."""
