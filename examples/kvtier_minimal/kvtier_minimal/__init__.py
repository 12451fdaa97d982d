"""The smallest complete kvtier tier."""
