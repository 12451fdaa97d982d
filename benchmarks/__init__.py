"""What kvtier costs, as ratios to what the machine can do, measured in the same run."""
