"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# The same examples in every run and on every rank, and no deadline: the machine may be busy.
settings.register_profile("dorylus", deadline=None, derandomize=True, database=None)
settings.load_profile("dorylus")
