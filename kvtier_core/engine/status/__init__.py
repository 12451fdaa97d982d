"""What a running engine tells `kvtier status`, `top` and `explain`, over a Unix socket of its user."""
