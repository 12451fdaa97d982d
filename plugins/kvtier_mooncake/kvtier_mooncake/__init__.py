"""A kvtier store tier on Mooncake Store."""
