from .checks import FloatArray, IntArray

def pack_max(
    source: IntArray,
    d_out: FloatArray,
    ids: IntArray,
    packed: FloatArray,
    keys: IntArray,
    start: int,
    stop: int,
    num_threads: int,
) -> None: ...
def gather_max_pull(
    indptr: IntArray,
    indices: IntArray,
    packed: FloatArray,
    ids: IntArray,
    d_x: FloatArray,
    start: int,
    stop: int,
    level: int,
    num_threads: int,
) -> None: ...
