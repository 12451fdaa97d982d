"""A tier of kvtier that keeps frames in a dict."""
