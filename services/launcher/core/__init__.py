"""What the launcher computes without I/O."""
