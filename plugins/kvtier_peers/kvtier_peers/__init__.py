"""A kvtier store tier of the frames in other engines' memory."""
