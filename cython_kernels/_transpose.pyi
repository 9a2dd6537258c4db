from .checks import IntArray

def transpose_csr(
    indptr: IntArray,
    indices: IntArray,
    indptr_t: IntArray,
    indices_t: IntArray,
    entries: IntArray,
    begin: IntArray,
) -> None: ...
