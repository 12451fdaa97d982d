"""`kvtier fleet`: one command over many servers."""
