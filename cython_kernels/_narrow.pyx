"""Threads of `narrow`; the loops are C++ (simd/narrow.hpp), and the door has checked everything."""

from cython.parallel cimport prange
from libc.stdint cimport int64_t

from ._types cimport cut, pieces, real_t

cdef extern from "simd/narrow.hpp" namespace "dorylus" nogil:
    const int NARROW_BLOCK

    cdef cppclass NarrowProduct[A]:
        const A* a
        int64_t depth
        const A* b
        A* out
        int64_t columns

    void narrow_rows[A](int level, const NarrowProduct[A]& g, int64_t start, int64_t stop)
    void narrow_adjoint[A](int level, const NarrowProduct[A]& g, int64_t n, int64_t left, int64_t right)


def block_rows():
    """Rows whose share of an adjoint is summed by itself."""
    return NARROW_BLOCK


def narrow_product(
    const real_t[:, ::1] a, const real_t[:, ::1] padded, real_t[:, ::1] out, int level, int num_threads
):
    """Threads take equal pieces of the rows. Columns of `padded` are whole cache lines."""
    cdef NarrowProduct[real_t] g
    cdef Py_ssize_t k
    cdef Py_ssize_t n = out.shape[0]
    cdef Py_ssize_t parts = pieces(n, num_threads)
    if n == 0 or out.shape[1] == 0:
        return
    g.depth = a.shape[1]
    g.a = &a[0, 0] if g.depth > 0 else NULL
    g.b = &padded[0, 0] if g.depth > 0 else NULL
    g.out = &out[0, 0]
    g.columns = out.shape[1]
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        narrow_rows(level, g, cut(n, parts, k), cut(n, parts, k + 1))


def narrow_product_adjoint(
    const real_t[:, ::1] a, const real_t[:, ::1] d_out, real_t[:, ::1] d_b, int level, int num_threads
):
    """Threads take equal pieces of the columns of `a`."""
    cdef NarrowProduct[real_t] g
    cdef Py_ssize_t k
    cdef Py_ssize_t n = a.shape[0]
    cdef Py_ssize_t depth = d_b.shape[0]
    cdef Py_ssize_t parts = pieces(depth, num_threads)
    if depth == 0 or d_b.shape[1] == 0:
        return
    g.depth = depth
    g.a = &a[0, 0] if n > 0 else NULL
    g.b = &d_out[0, 0] if n > 0 else NULL
    g.out = &d_b[0, 0]
    g.columns = d_b.shape[1]
    for k in prange(parts, nogil=True, schedule="static", num_threads=num_threads):
        narrow_adjoint(level, g, n, cut(depth, parts, k), cut(depth, parts, k + 1))
