from .checks import FloatArray, IntArray

def hub_degree() -> int: ...
def gather(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray,
    x: FloatArray,
    out: FloatArray,
    columns: int,
    row_scale: FloatArray,
    source_scale: FloatArray,
    self_weight: float,
    mean: bool,
    accumulate: bool,
    stream: bool,
    start: int,
    stop: int,
    scratch: FloatArray,
    level: int,
    num_threads: int,
) -> None: ...
def gather_max(
    indptr: IntArray,
    indices: IntArray,
    x: FloatArray,
    out: FloatArray,
    source: IntArray,
    start: int,
    stop: int,
    scratch: FloatArray,
    level: int,
    num_threads: int,
) -> None: ...
def gather_max_adjoint(
    source: IntArray,
    d_out: FloatArray,
    d_x: FloatArray,
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
    level: int,
    num_threads: int,
) -> None: ...
def to_bfloat16(x: FloatArray, out: IntArray, level: int, num_threads: int) -> None: ...
def from_bfloat16(x: IntArray, out: FloatArray, level: int, num_threads: int) -> None: ...
