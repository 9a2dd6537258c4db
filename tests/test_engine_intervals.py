"""Vertex intervals: a partition of the rows, balanced by edges, decided by sizes alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dorylus_hpc.engine.intervals import cut_intervals, interval_count


def rows_of(intervals: tuple[tuple[int, int], ...]) -> list[int]:
    return [row for start, stop in intervals for row in range(start, stop)]


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 70))
def test_intervals_are_a_partition_into_as_many_as_wanted(degrees: list[int], count: int) -> None:
    intervals = cut_intervals(np.concatenate([[0], np.cumsum(degrees, dtype=np.int64)]), count)
    assert rows_of(intervals) == list(range(len(degrees)))
    assert len(intervals) == min(count, len(degrees))
    assert all(start < stop for start, stop in intervals)


@given(st.lists(st.integers(0, 9), min_size=200, max_size=400), st.integers(2, 20))
def test_intervals_are_balanced_by_edges(degrees: list[int], count: int) -> None:
    indptr = np.concatenate([[0], np.cumsum(degrees, dtype=np.int64)])
    cost = [stop - start + indptr[stop] - indptr[start] for start, stop in cut_intervals(indptr, count)]
    assert max(cost) <= (len(degrees) + indptr[-1]) / count + 10 + 1  # a share and at most one row more


@pytest.mark.parametrize("hub", [0, 7, 19])
def test_a_hub_leaves_every_interval_a_row(hub: int) -> None:
    degrees = np.ones(20, np.int64)
    degrees[hub] = 10_000
    intervals = cut_intervals(np.concatenate([[0], np.cumsum(degrees)]), 20)
    assert intervals == tuple((row, row + 1) for row in range(20))


def test_the_count_follows_the_work_and_is_bounded() -> None:
    assert interval_count(0, 0, 64) == 1
    assert interval_count(1000, 5000, 16) == 1
    assert interval_count(100_000, 1_000_000, 128) == 8  # 4.7 pieces of 30 million, a multiple of 4
    assert interval_count(100_000, 1_000_000, 128, 8 * 2_000) == 12  # 11.4
    assert interval_count(10**9, 10**10, 602) == 64
