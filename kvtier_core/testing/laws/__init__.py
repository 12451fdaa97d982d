"""What plugins of each kind promise, as test suites to subclass."""
