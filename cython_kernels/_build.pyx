"""How this very binary was compiled."""

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


def build_info():
    """Tell how the kernels were compiled.

    Returns
    -------
    dict
        ``bounds_check``: whether every array access is checked (built with
        ``DORYLUS_BOUNDS_CHECK=1``); ``openmp``: whether ``num_threads`` has an effect.
    """
    return {"bounds_check": bool(DORYLUS_BOUNDS_CHECK), "openmp": bool(DORYLUS_OPENMP)}
