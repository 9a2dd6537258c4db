"""Loops of `dropout_masks` that are not those of `activation`; the generator is in simd/rowwise_body.hpp."""

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from ._rowwise cimport EntryDropout, drop_entries, make_mask, philox_block
from ._types cimport cut, pieces, real_t

cdef extern from *:
    const int DORYLUS_BOUNDS_CHECK


def philox(
    int level, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t key0, uint32_t key1
):
    """The four words of one counter."""
    cdef uint32_t[4] words = [c0, c1, c2, c3]
    philox_block(level, words, key0, key1)
    return words[0], words[1], words[2], words[3]


def dropout_csr(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[::1] data,
    const int64_t[::1] gids,
    real_t[::1] out,
    uint64_t key,
    uint32_t epoch,
    uint64_t threshold,
    double scale,
    int level,
    int num_threads,
):
    """Threads take equal pieces of the rows."""
    cdef EntryDropout[real_t] work
    cdef Py_ssize_t k
    cdef Py_ssize_t n = gids.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    if n == 0 or indices.shape[0] == 0:
        return
    if DORYLUS_BOUNDS_CHECK:
        for k in range(n):
            if not 0 <= indptr[k] <= indptr[k + 1] <= indices.shape[0]:
                raise IndexError(f"Out of bounds: row {k} has entries {indptr[k]} to {indptr[k + 1]}")
    work.indptr = &indptr[0]
    work.indices = &indices[0]
    work.data = &data[0]
    work.gids = &gids[0]
    work.out = &out[0]
    work.scale = <real_t>scale
    work.mask = make_mask(key, epoch, threshold)
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        drop_entries(level, work, cut(n, parts, k), cut(n, parts, k + 1))
