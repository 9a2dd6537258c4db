"""Loops of `dropout_masks`."""

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from ._philox cimport Mask, drop_row, make_mask, mask_words, philox4x32
from ._types cimport cut, pieces, real_t


def philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t key0, uint32_t key1):
    """The four words of one counter."""
    cdef uint32_t[4] words = [c0, c1, c2, c3]
    philox4x32(words, key0, key1)
    return words[0], words[1], words[2], words[3]


def dropout(
    const real_t[:, ::1] x,
    const int64_t[::1] gids,
    real_t[:, ::1] out,
    uint64_t key,
    uint32_t epoch,
    uint64_t threshold,
    double scale,
    int num_threads,
):
    """Threads take equal pieces of the rows."""
    cdef Py_ssize_t k
    cdef Py_ssize_t n = x.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    cdef Mask mask = make_mask(key, epoch, threshold)
    if x.shape[1] == 0:
        return
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        drop_piece(x, gids, out, mask, <real_t>scale, cut(n, parts, k), cut(n, parts, k + 1))


cdef int drop_piece(
    const real_t[:, ::1] x,
    const int64_t[::1] gids,
    real_t[:, ::1] out,
    Mask mask,
    real_t scale,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t i
    for i in range(start, stop):
        drop_row(&x[i, 0], &out[i, 0], x.shape[1], &mask, gids[i], scale)
    return 0


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
    int num_threads,
):
    """Threads take equal pieces of the rows."""
    cdef Py_ssize_t k
    cdef Py_ssize_t n = gids.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    cdef Mask mask = make_mask(key, epoch, threshold)
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        drop_csr_piece(
            indptr, indices, data, gids, out, mask, <real_t>scale, cut(n, parts, k), cut(n, parts, k + 1)
        )


cdef int drop_csr_piece(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const real_t[::1] data,
    const int64_t[::1] gids,
    real_t[::1] out,
    Mask mask,
    real_t scale,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef uint32_t words[4]
    cdef int32_t quad, known  # the quad of columns whose words are at hand: sorted entries share them
    cdef Py_ssize_t i, e
    for i in range(start, stop):
        known = -1
        for e in range(indptr[i], indptr[i + 1]):
            quad = indices[e] >> 2
            if quad != known:
                mask_words(words, &mask, gids[i], <uint32_t>quad)
                known = quad
            if words[indices[e] & 3] >= mask.threshold:
                out[e] = data[e] * scale
            else:
                out[e] = 0
    return 0
