"""A kvtier store tier of slabs: preallocated files on the NVMe drives of this machine."""
