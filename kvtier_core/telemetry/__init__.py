"""The stream of events, and its readers: the log, readings, observers, the status page."""
