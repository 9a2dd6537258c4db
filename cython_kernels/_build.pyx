"""How this very binary was compiled, and what the CPU it runs on can do."""

cdef extern from *:
    """
    #ifdef _OPENMP
    #define DORYLUS_OPENMP 1
    #else
    #define DORYLUS_OPENMP 0
    #endif
    """
    const int DORYLUS_OPENMP
    const int DORYLUS_BOUNDS_CHECK

cdef extern from *:
    """
    #if defined(_OPENMP) && defined(__GNUC__) && !defined(__clang__)
    #include <omp.h>
    #define DORYLUS_END_THREADS() omp_pause_resource_all(omp_pause_soft)
    #else  // clang's runtime sees to a fork by itself
    #define DORYLUS_END_THREADS() 0
    #endif
    """
    int DORYLUS_END_THREADS()

cdef extern from "simd/isa.hpp" namespace "dorylus":
    int detect_level()


def build_info():
    """Tell how the kernels were compiled.

    Returns
    -------
    dict
        ``bounds_check``: whether every array access is checked (built with
        ``DORYLUS_BOUNDS_CHECK=1``); ``openmp``: whether ``num_threads`` has an effect.
    """
    return {"bounds_check": bool(DORYLUS_BOUNDS_CHECK), "openmp": bool(DORYLUS_OPENMP)}


def best_level():
    """The best level of instructions that this CPU has: 0 baseline, 1 AVX2, 2 AVX-512."""
    return detect_level()


def end_threads():
    """End the threads that OpenMP keeps for the calling one; its next call of a kernel makes new ones.

    For a fork: threads are not there in the child, and GNU's runtime would wait for them there for ever.
    """
    DORYLUS_END_THREADS()
