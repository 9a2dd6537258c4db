"""Models as stage programs, their start values, optimizers, and the one-process oracle. No MPI."""
