"""Load tests: workloads, measurements and their reports."""
