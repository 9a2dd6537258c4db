"""Loop of `layout.miss_rate`."""

import numpy as np

from libc.stdint cimport int32_t, uint64_t


def miss_rate(const int32_t[::1] indices, Py_ssize_t warm, Py_ssize_t cached_rows):
    """Simulate a cache of `cached_rows` places, one per hash value; count after the first `warm` reads."""
    cdef int32_t[::1] held = np.full(cached_rows, -1, dtype=np.int32)
    cdef Py_ssize_t e, place
    cdef Py_ssize_t misses = 0
    cdef Py_ssize_t n = indices.shape[0]
    if n <= warm:
        return 0.0
    with nogil:
        for e in range(n):
            # Fibonacci hashing spreads runs of indices, as a real cache's many ways would.
            place = <Py_ssize_t>(((<uint64_t>indices[e] * <uint64_t>0x9E3779B97F4A7C15u) >> 32) % <uint64_t>cached_rows)
            if held[place] != indices[e]:
                held[place] = indices[e]
                misses += e >= warm
    return <double>misses / <double>(n - warm)
