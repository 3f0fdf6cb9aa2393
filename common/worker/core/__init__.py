"""A worker's decisions, without I/O: memory, scheduling, prompts, parts."""
