from .checks import FloatArray, IntArray

def transpose_csr(
    indptr: IntArray,
    indices: IntArray,
    indptr_t: IntArray,
    indices_t: IntArray,
    entries: IntArray,
    begin: IntArray,
) -> None: ...
def transpose_rows(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray,
    source_scale: FloatArray,
    start: int,
    stop: int,
    indptr_t: IntArray,
    indices_t: IntArray,
    values_t: FloatArray,
    begin: IntArray,
) -> None: ...
def permute(
    indptr_t: IntArray,
    entries: IntArray,
    data: FloatArray,
    source_scale: FloatArray,
    values_t: FloatArray,
    num_threads: int,
) -> None: ...
def first_wrong(
    indptr: IntArray,
    indices: IntArray,
    indptr_t: IntArray,
    indices_t: IntArray,
    entries: IntArray,
    wrong: IntArray,
) -> None: ...
