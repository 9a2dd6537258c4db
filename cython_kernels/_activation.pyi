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
def bias_elu_dropout(
    x: FloatArray,
    bias: FloatArray,
    gids: IntArray,
    out: FloatArray,
    key: int,
    epoch: int,
    threshold: int,
    scale: float,
    level: int,
    num_threads: int,
) -> None: ...
def elu_dropout_backward(
    d_h: FloatArray,
    h: FloatArray,
    gids: IntArray,
    out: FloatArray,
    key: int,
    epoch: int,
    threshold: int,
    scale: float,
    keep: float,
    level: int,
    num_threads: int,
) -> None: ...
