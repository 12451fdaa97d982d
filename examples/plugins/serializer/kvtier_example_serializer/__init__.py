"""A serializer of kvtier: zlib."""
