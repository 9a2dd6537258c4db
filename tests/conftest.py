"""Settings for all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# The asserts of these shared modules explain themselves as those of the tests do.
pytest.register_assert_rewrite("distributed", "graphs", "serverless")

# The same examples in every run and on every rank, and no deadline: the machine may be busy.
settings.register_profile("dorylus", deadline=None, derandomize=True, database=None)
settings.load_profile("dorylus")


@pytest.fixture(autouse=True)
def _environment_is_left_alone():
    """A variable that a test takes away or changes would change what later tests and their processes do."""
    before = dict(os.environ)
    yield
    before.pop("PYTEST_CURRENT_TEST", None)
    assert {name: os.environ.get(name) for name in before} == before  # imported libraries add some
