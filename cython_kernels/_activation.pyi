from .checks import FloatArray, IntArray

def bias_relu_dropout(
    z: FloatArray,
    bias: FloatArray,
    gids: IntArray,
    row_scale: FloatArray,
    out: FloatArray,
    relu: bool,
    key: int,
    epoch: int,
    threshold: int,
    scale: float,
    stream: bool,
    level: int,
    num_threads: int,
) -> None: ...
def relu_dropout_backward(
    d_out: FloatArray,
    activated: FloatArray,
    row_scale: FloatArray,
    out: FloatArray,
    scale: float,
    stream: bool,
    level: int,
    num_threads: int,
) -> None: ...
