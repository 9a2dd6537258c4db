"""Measurements: accuracy on public graphs, and the time of an epoch. Each is run with ``python -m``."""
