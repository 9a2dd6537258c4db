"""Graphs: readers and checks, cleaning, partitioners, parts on disk, normalisation. No MPI here."""
