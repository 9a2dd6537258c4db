# Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
# and the dropout masks made from it: a word is a pure function of (key, epoch, vertex, column), so
# a mask never depends on who computes it, or in which order.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from ._types cimport real_t


cdef enum:
    RUN = 64  # columns whose words are made before they are used; a multiple of 4


ctypedef struct Mask:
    uint32_t key0
    uint32_t key1
    uint32_t epoch
    uint64_t threshold  # a column is kept iff its word is at least this; up to 2**32


cdef inline Mask make_mask(uint64_t key, uint32_t epoch, uint64_t threshold) noexcept nogil:
    cdef Mask mask
    mask.key0 = <uint32_t>key
    mask.key1 = <uint32_t>(key >> 32)
    mask.epoch = epoch
    mask.threshold = threshold
    return mask


cdef inline void philox4x32(uint32_t* words, uint32_t key0, uint32_t key1) noexcept nogil:
    # `words` holds the counter on entry and the four random words on return.
    cdef uint32_t c0 = words[0]
    cdef uint32_t c1 = words[1]
    cdef uint32_t c2 = words[2]
    cdef uint32_t c3 = words[3]
    cdef uint64_t product0, product1
    cdef int step
    for step in range(10):
        product0 = <uint64_t>0xD2511F53u * c0
        product1 = <uint64_t>0xCD9E8D57u * c2
        c0 = <uint32_t>(product1 >> 32) ^ c1 ^ key0
        c1 = <uint32_t>product1
        c2 = <uint32_t>(product0 >> 32) ^ c3 ^ key1
        c3 = <uint32_t>product0
        key0 += 0x9E3779B9u
        key1 += 0xBB67AE85u
    words[0] = c0
    words[1] = c1
    words[2] = c2
    words[3] = c3


cdef inline void mask_words(uint32_t* words, Mask* mask, int64_t gid, uint32_t quad) noexcept nogil:
    # The words of columns 4 * quad .. 4 * quad + 3 of a vertex.
    words[0] = quad
    words[1] = mask.epoch
    words[2] = <uint32_t>(<uint64_t>gid)
    words[3] = <uint32_t>(<uint64_t>gid >> 32)
    philox4x32(words, mask.key0, mask.key1)


cdef inline void drop_row(
    const real_t* x, real_t* out, Py_ssize_t f, Mask* mask, int64_t gid, real_t scale
) noexcept nogil:
    # out may be x. Values are chosen, not multiplied by 0, so that no dropped NaN gets through.
    cdef uint32_t words[RUN]
    cdef Py_ssize_t first = 0
    cdef Py_ssize_t width, k
    cdef real_t value
    while first < f:
        width = min(<Py_ssize_t>RUN, f - first)
        for k in range(0, width, 4):
            mask_words(words + k, mask, gid, <uint32_t>((first + k) >> 2))
        for k in range(width):
            value = x[first + k] * scale
            out[first + k] = value if words[k] >= mask.threshold else <real_t>0
        first += width
