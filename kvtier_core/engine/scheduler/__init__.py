"""The parts of the scheduler side: requests, loads, stores, and which blocks may be trusted."""
