"""How an engine uses a server: the protocol, a client in its scheduler, and its memory in each worker."""
