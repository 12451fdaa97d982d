"""The answers of a running engine to `kvtier status`, `top` and `explain`, over a Unix socket of its user."""
