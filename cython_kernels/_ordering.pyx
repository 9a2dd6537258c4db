"""Loops of `ordering`, over square CSR matrices. The door has checked everything.

One thread runs each loop: a vertex takes its label from those of its neighbours as they are at that
moment, so threads would race for the result; and one of them needs no longer than a few gathers.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

cdef enum:
    SLOTS = 16  # most neighbours of a vertex that are looked at; `ordering.SLOTS` says the same
    HEAVIEST = 1 << 26  # weights stop growing here, so that SLOTS of them do not overflow


cdef inline uint64_t mixed(uint64_t key) noexcept nogil:
    # The finaliser of SplitMix64.
    key = (key ^ (key >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * <uint64_t>0x94D049BB133111EB
    return key ^ (key >> 31)


cdef inline uint64_t scrambled(uint64_t key) noexcept nogil:
    # Cheaper than `mixed`, for it meets every entry.
    key = (key + 1) * <uint64_t>0x9E3779B97F4A7C15
    return (key ^ (key >> 29)) * <uint64_t>0xBF58476D1CE4E5B9


cdef inline uint64_t scrambled_anew(uint64_t key) noexcept nogil:
    # Another hash of the kind.
    key = (key + 1) * <uint64_t>0xD6E8FEB86659FD93
    return (key ^ (key >> 32)) * <uint64_t>0x94D049BB133111EB


def asymmetry(const int64_t[::1] indptr, const int32_t[::1] indices):
    """Sum over all entries of g(i) h(j) - g(j) h(i), g and h hashes: 0 if each entry has its mirror image.

    Both are needed: with g(i) = i, entries (1, 0), (2, 0) and (0, 3) would add up to 0.
    """
    cdef uint64_t total
    with nogil:
        total = mirror_sum(indptr, indices)
    return total


cdef uint64_t mirror_sum(const int64_t[::1] indptr, const int32_t[::1] indices) except? 1 nogil:
    cdef uint64_t total = 0, hashes, others, key
    cdef Py_ssize_t i, e
    for i in range(indptr.shape[0] - 1):
        hashes = 0
        others = 0
        for e in range(indptr[i], indptr[i + 1]):
            key = <uint64_t>indices[e]
            others += scrambled_anew(key)
            hashes += scrambled(key)
        total += scrambled_anew(<uint64_t>i) * hashes - others * scrambled(<uint64_t>i)
    return total


def sample(
    const int64_t[::1] indptr, const int32_t[::1] indices, int64_t[::1] starts, int32_t[::1] neighbours
):
    """Copy all or SLOTS evenly spaced neighbours of each vertex, without loops."""
    with nogil:
        sample_rows(indptr, indices, starts, neighbours)


cdef int sample_rows(
    const int64_t[::1] indptr, const int32_t[::1] indices, int64_t[::1] starts, int32_t[::1] neighbours
) except -1 nogil:
    cdef Py_ssize_t i, k, degree, taken, filled = 0
    starts[0] = 0
    for i in range(indptr.shape[0] - 1):
        degree = indptr[i + 1] - indptr[i]
        taken = min(degree, <Py_ssize_t>SLOTS)
        for k in range(taken):
            neighbours[filled] = indices[indptr[i] + k * degree // taken]
            filled += neighbours[filled] != i
        starts[i + 1] = filled
    return 0


def propagate(
    const int64_t[::1] starts,
    const int32_t[::1] neighbours,
    const int32_t[::1] weights,
    const int64_t[::1] mass,
    int64_t bound,
    int32_t[::1] label,
    int64_t[::1] size,
    int32_t[::1] count,
    uint64_t seed,
):
    """One round: each vertex in turn joins the group it has most weight to, if there is room in it.

    `label` and `size` (of each label) are updated in place; `count` is all 0 before and after. Ties go
    to the own label, then to the first from a neighbour that `seed` picks. Returns how many moved.
    """
    cdef Py_ssize_t moved
    with nogil:
        moved = propagate_rows(starts, neighbours, weights, mass, bound, label, size, count, seed)
    return moved


cdef Py_ssize_t propagate_rows(
    const int64_t[::1] starts,
    const int32_t[::1] neighbours,
    const int32_t[::1] weights,
    const int64_t[::1] mass,
    int64_t bound,
    int32_t[::1] label,
    int64_t[::1] size,
    int32_t[::1] count,
    uint64_t seed,
) except -1 nogil:
    cdef int32_t seen[SLOTS]
    cdef Py_ssize_t i, k, turn, degree, moved = 0
    cdef int32_t own, best, here
    cdef int32_t most
    for i in range(starts.shape[0] - 1):
        degree = starts[i + 1] - starts[i]
        if degree == 0:
            continue
        own = label[i]
        for k in range(degree):
            here = label[neighbours[starts[i] + k]]
            seen[k] = here
            count[here] += weights[starts[i] + k]
        best = own
        most = count[own]
        turn = <Py_ssize_t>(((mixed(seed + <uint64_t>i) >> 32) * <uint64_t>degree) >> 32)
        for k in range(degree):
            here = seen[turn]
            if count[here] > most and size[here] + mass[i] <= bound:
                best = here
                most = count[here]
            turn += 1
            if turn == degree:
                turn = 0
        for k in range(degree):
            count[seen[k]] = 0
        if best != own:
            size[own] -= mass[i]
            size[best] += mass[i]
            label[i] = best
            moved += 1
    return moved


def group(int32_t[::1] label, int32_t[::1] number, int64_t[::1] first, int32_t[::1] members):
    """Number the labels by first occurrence, in place, and list the vertices of each.

    Group g is ``members[first[g]:first[g + 1]]``, ascending. Returns the number of groups.
    """
    cdef Py_ssize_t k
    with nogil:
        k = group_rows(label, number, first, members)
    return k


cdef Py_ssize_t group_rows(
    int32_t[::1] label, int32_t[::1] number, int64_t[::1] first, int32_t[::1] members
) except -1 nogil:
    cdef Py_ssize_t i, n = label.shape[0]
    cdef int32_t groups = 0
    for i in range(n):
        number[i] = -1
    for i in range(n):
        if number[label[i]] < 0:
            number[label[i]] = groups
            groups += 1
        label[i] = number[label[i]]
    for i in range(groups + 1):
        first[i] = 0
    for i in range(n):
        first[label[i] + 1] += 1
    for i in range(groups):
        first[i + 1] += first[i]
    for i in range(n):
        members[first[label[i]]] = <int32_t>i
        first[label[i]] += 1
    for i in range(groups, 0, -1):
        first[i] = first[i - 1]
    first[0] = 0
    return groups


def contract(
    const int64_t[::1] starts,
    const int32_t[::1] neighbours,
    const int32_t[::1] weights,
    const int32_t[::1] label,
    const int64_t[::1] first,
    const int32_t[::1] members,
    int32_t[::1] count,
    int32_t[::1] touched,
    int64_t[::1] new_starts,
    int32_t[::1] new_neighbours,
    int32_t[::1] new_weights,
):
    """The graph of the groups: for each the SLOTS others it has most weight to, heaviest first."""
    with nogil:
        contract_rows(
            starts, neighbours, weights, label, first, members, count, touched,
            new_starts, new_neighbours, new_weights,
        )


cdef int contract_rows(
    const int64_t[::1] starts,
    const int32_t[::1] neighbours,
    const int32_t[::1] weights,
    const int32_t[::1] label,
    const int64_t[::1] first,
    const int32_t[::1] members,
    int32_t[::1] count,
    int32_t[::1] touched,
    int64_t[::1] new_starts,
    int32_t[::1] new_neighbours,
    int32_t[::1] new_weights,
) except -1 nogil:
    cdef Py_ssize_t c, m, e, k, filled = 0, n_touched, taken
    cdef int32_t far, weight
    new_starts[0] = 0
    for c in range(new_starts.shape[0] - 1):
        n_touched = 0
        for m in range(first[c], first[c + 1]):
            for e in range(starts[members[m]], starts[members[m] + 1]):
                far = label[neighbours[e]]
                if far == c:
                    continue
                if count[far] == 0:
                    touched[n_touched] = far
                    n_touched += 1
                count[far] = min(count[far] + weights[e], <int32_t>HEAVIEST)
        # Insertion into a short list by falling weight; of equals the one found first stays first.
        taken = 0
        for m in range(n_touched):
            far = touched[m]
            weight = count[far]
            count[far] = 0
            if taken == SLOTS:
                if weight <= new_weights[filled + SLOTS - 1]:
                    continue
                taken -= 1
            k = taken
            while k > 0 and new_weights[filled + k - 1] < weight:
                new_weights[filled + k] = new_weights[filled + k - 1]
                new_neighbours[filled + k] = new_neighbours[filled + k - 1]
                k -= 1
            new_weights[filled + k] = weight
            new_neighbours[filled + k] = far
            taken += 1
        filled += taken
        new_starts[c + 1] = filled
    return 0


def misses(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const int32_t[::1] order,
    int64_t[::1] last,
    Py_ssize_t windows,
    Py_ssize_t length,
    const int64_t[::1] reaches,
    int64_t[::1] missed,
):
    """Walk windows of entries in the given order of rows, round and round; count gaps between uses.

    The first half of a window only warms up. Adds to `missed` how many gaps exceed each reach, and
    returns how many entries were looked at. `last`, when a source was used, is far below 0 at first.
    """
    cdef int64_t counted
    with nogil:
        counted = count_misses(indptr, indices, order, last, windows, length, reaches, missed)
    return counted


cdef int64_t count_misses(
    const int64_t[::1] indptr,
    const int32_t[::1] indices,
    const int32_t[::1] order,
    int64_t[::1] last,
    Py_ssize_t windows,
    Py_ssize_t length,
    const int64_t[::1] reaches,
    int64_t[::1] missed,
) except -1 nogil:
    cdef Py_ssize_t window, k, e, row, r, first = 0, n = order.shape[0]
    cdef int64_t now = 0, begin, gap, passed = 0, counted = 0
    for window in range(windows):
        # Windows are spaced by entries, not by rows: a row without entries costs nothing.
        while first < n and passed < window * indices.shape[0] // windows:
            passed += indptr[order[first] + 1] - indptr[order[first]]
            first += 1
        # What earlier windows used is long ago.
        now += reaches[reaches.shape[0] - 1] + 1
        begin = now
        k = first if first < n else 0
        while now - begin < length:
            row = order[k]
            for e in range(indptr[row], indptr[row + 1]):
                gap = now - last[indices[e]]
                last[indices[e]] = now
                if now - begin >= length // 2:
                    counted += 1
                    for r in range(reaches.shape[0]):
                        missed[r] += gap > reaches[r]
                now += 1
            k = k + 1 if k + 1 < n else 0
    return counted
