"""Measurements of kernels, of accuracy on public graphs, of an epoch's time. Run each with ``python -m``."""
