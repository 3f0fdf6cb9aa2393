"""What every process of the mesh stands on: clock, settings, life cycle, tasks, logs, metrics."""
