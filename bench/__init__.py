"""Measurements of kernels, accuracy on public graphs, whole epochs, scaling. Run each with ``python -m``."""
