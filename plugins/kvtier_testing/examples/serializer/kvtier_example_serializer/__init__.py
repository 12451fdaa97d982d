"""A serializer of kvtier: zlib on the upper bytes of numbers."""
