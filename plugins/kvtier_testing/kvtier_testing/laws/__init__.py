"""The promises of plugins of each kind, as test suites to subclass."""
