"""Loops of `loss`."""

from cython.parallel cimport prange
from libc.math cimport exp, fabs, log, log1p
from libc.stdint cimport int32_t, uint8_t

from ._types cimport cut, pieces, real_t


def softmax_cross_entropy(
    const real_t[:, ::1] logits,
    const int32_t[::1] labels,
    const uint8_t[::1] mask,
    const double[::1] class_weights,
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
        softmax_piece(
            logits, labels, mask, class_weights, row_loss, d_logits, with_gradient, scale,
            cut(n, parts, k), cut(n, parts, k + 1),
        )
    for i in range(n):
        total += row_loss[i]
    return total


cdef int softmax_piece(
    const real_t[:, ::1] logits,
    const int32_t[::1] labels,
    const uint8_t[::1] mask,
    const double[::1] class_weights,
    double[::1] row_loss,
    real_t[:, ::1] d_logits,
    bint with_gradient,
    double scale,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t i, c
    cdef Py_ssize_t n_classes = logits.shape[1]
    cdef bint weighted = class_weights.shape[0] > 0
    cdef double largest, total, exponential, factor, share
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
        row_loss[i] = -(logits[i, labels[i]] - largest)  # logits may be written over
        for c in range(n_classes):
            exponential = exp(logits[i, c] - largest)
            total += exponential
            if with_gradient:
                d_logits[i, c] = <real_t>exponential  # exponentials take longest: once each
        row_loss[i] += log(total)
        factor = scale
        if weighted:
            row_loss[i] *= class_weights[labels[i]]
            factor *= class_weights[labels[i]]
        if with_gradient:
            share = factor / total
            for c in range(n_classes):
                d_logits[i, c] = <real_t>(share * d_logits[i, c] - (factor if c == labels[i] else 0.0))
    return 0


def sigmoid_cross_entropy(
    const real_t[:, ::1] logits,
    const uint8_t[:, ::1] labels,
    const uint8_t[::1] mask,
    const double[::1] pos_weight,
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
        sigmoid_piece(
            logits, labels, mask, pos_weight, row_loss, d_logits, with_gradient, scale,
            cut(n, parts, k), cut(n, parts, k + 1),
        )
    for i in range(n):
        total += row_loss[i]
    return total


cdef int sigmoid_piece(
    const real_t[:, ::1] logits,
    const uint8_t[:, ::1] labels,
    const uint8_t[::1] mask,
    const double[::1] pos_weight,
    double[::1] row_loss,
    real_t[:, ::1] d_logits,
    bint with_gradient,
    double scale,
    Py_ssize_t start,
    Py_ssize_t stop,
) except -1 nogil:
    cdef Py_ssize_t i, c
    cdef Py_ssize_t n_classes = logits.shape[1]
    cdef bint weighted = pos_weight.shape[0] > 0
    cdef double z, decay, weight, total, slope
    for i in range(start, stop):
        if not mask[i]:
            row_loss[i] = 0
            if with_gradient:
                for c in range(n_classes):
                    d_logits[i, c] = 0
            continue
        total = 0
        for c in range(n_classes):
            if labels[i, c] == 255:
                if with_gradient:
                    d_logits[i, c] = 0
                continue
            # With z turned so that the answer is right where it is large: -log sigmoid(z), never exp of
            # what is positive.
            z = logits[i, c] if labels[i, c] else -logits[i, c]
            decay = exp(-fabs(z))
            weight = pos_weight[c] if weighted and labels[i, c] else 1.0
            total += weight * (log1p(decay) + (0.0 if z > 0 else -z))
            if with_gradient:
                slope = weight * (decay if z > 0 else 1.0) / (1.0 + decay)
                d_logits[i, c] = <real_t>(scale * (-slope if labels[i, c] else slope))
        row_loss[i] = total
    return 0
