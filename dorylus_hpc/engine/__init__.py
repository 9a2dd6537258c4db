"""The training engine: schedule, tasks, weights, trainer."""
