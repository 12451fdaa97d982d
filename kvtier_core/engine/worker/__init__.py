"""The worker side: movers, readers, and the self-test before they serve."""
