"""Loops of `loss`."""

from cython.parallel cimport prange
from libc.math cimport exp, log
from libc.stdint cimport int32_t, uint8_t

from ._types cimport cut, pieces, real_t


def softmax_cross_entropy(
    const real_t[:, ::1] logits,
    const int32_t[::1] labels,
    const uint8_t[::1] mask,
    double[::1] row_loss,
    real_t[:, ::1] d_logits,
    bint with_gradient,
    double scale,
    int num_threads,
):
    """Fill `row_loss` and `d_logits` and return the sum of `row_loss`, added in the order of the rows."""
    cdef Py_ssize_t k, i
    cdef Py_ssize_t n = logits.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    cdef double total = 0
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        loss_piece(
            logits, labels, mask, row_loss, d_logits, with_gradient, scale, cut(n, parts, k), cut(n, parts, k + 1)
        )
    for i in range(n):
        total += row_loss[i]
    return total


cdef int loss_piece(
    const real_t[:, ::1] logits,
    const int32_t[::1] labels,
    const uint8_t[::1] mask,
    double[::1] row_loss,
    real_t[:, ::1] d_logits,
    bint with_gradient,
    double scale,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t i, c
    cdef Py_ssize_t n_classes = logits.shape[1]
    cdef double largest, total, probability
    for i in range(start, stop):
        if not mask[i]:
            row_loss[i] = 0
            if with_gradient:
                for c in range(n_classes):
                    d_logits[i, c] = 0
            continue
        largest = logits[i, 0]
        for c in range(1, n_classes):
            largest = max(largest, <double>logits[i, c])
        total = 0
        for c in range(n_classes):
            total += exp(logits[i, c] - largest)
        row_loss[i] = log(total) - (logits[i, labels[i]] - largest)
        if with_gradient:
            for c in range(n_classes):
                probability = exp(logits[i, c] - largest) / total
                d_logits[i, c] = <real_t>(scale * (probability - (1.0 if c == labels[i] else 0.0)))
    return 0
