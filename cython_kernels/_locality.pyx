"""Loop of `layout.miss_rate`."""

import numpy as np

from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef enum:
    WAYS = 4


def miss_rate(const int32_t[::1] indices, Py_ssize_t warm, Py_ssize_t cached_rows, int skip_bits):
    """Simulate a cache of `cached_rows` rows, 4-way associative, the oldest out; count after `warm` reads.

    Only sets whose number ends in `skip_bits` zeros are simulated: one in 2**skip_bits.
    """
    cdef Py_ssize_t n_sets = (cached_rows + WAYS - 1) // WAYS
    cdef int32_t[:, ::1] held = np.full(((n_sets >> skip_bits) + 1, WAYS), -1, dtype=np.int32)
    cdef Py_ssize_t skipped = (<Py_ssize_t>1 << skip_bits) - 1
    cdef Py_ssize_t e, place, way
    cdef Py_ssize_t misses = 0
    cdef Py_ssize_t reads = 0
    with nogil:
        for e in range(indices.shape[0]):
            # Fibonacci hashing: the product modulo 2**32, scaled to the number of sets, spreads rows evenly.
            place = <Py_ssize_t>((<uint64_t>(<uint32_t>indices[e] * <uint32_t>0x9E3779B9u) * <uint64_t>n_sets) >> 32)
            if place & skipped:
                continue
            place >>= skip_bits
            way = 0
            while way < WAYS - 1 and held[place, way] != indices[e]:
                way += 1
            if e >= warm:
                reads += 1
                misses += held[place, way] != indices[e]
            while way > 0:
                held[place, way] = held[place, way - 1]
                way -= 1
            held[place, 0] = indices[e]
    return <double>misses / <double>reads if reads > 0 else 0.0
