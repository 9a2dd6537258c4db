from .checks import FloatArray, IntArray

def gather(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray,
    x: FloatArray,
    out: FloatArray,
    row_scale: FloatArray,
    source_scale: FloatArray,
    self_weight: float,
    mean: bool,
    accumulate: bool,
    start: int,
    stop: int,
    num_threads: int,
) -> None: ...
def gather_adjoint(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray,
    d_out: FloatArray,
    d_x: FloatArray,
    row_scale: FloatArray,
    source_scale: FloatArray,
    self_weight: float,
    mean: bool,
    accumulate: bool,
    start: int,
    stop: int,
    num_threads: int,
) -> None: ...
