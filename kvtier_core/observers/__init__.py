"""The core's own observers, and the table of metrics that one of them and vLLM's endpoint share."""
