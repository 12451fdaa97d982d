"""A kvtier store tier in a bucket of an S3-compatible object store."""
