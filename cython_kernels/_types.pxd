# What all kernels share: the element types and how work is cut.

from libc.stdint cimport uint16_t

ctypedef fused real_t:
    float
    double

ctypedef fused stored_t:  # what features may be stored in; uint16 holds the bits of bfloat16
    float
    double
    uint16_t


cdef inline Py_ssize_t cut(Py_ssize_t n, Py_ssize_t parts, Py_ssize_t k) noexcept nogil:
    # Where piece k of n items begins if they are cut into `parts` equal pieces; cut(n, p, p) == n.
    return (n // parts) * k + min(k, n % parts)


cdef inline Py_ssize_t pieces(Py_ssize_t n, int num_threads) noexcept nogil:
    # No more pieces than items, but at least one.
    return max(<Py_ssize_t>1, min(n, <Py_ssize_t>num_threads))
