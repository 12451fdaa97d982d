"""A kvtier store tier of files: on a local disk, or in a folder that engines share."""
