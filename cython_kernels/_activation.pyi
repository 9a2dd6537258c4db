from .checks import FloatArray, IntArray

def bias_relu_dropout(
    z: FloatArray,
    bias: FloatArray,
    gids: IntArray,
    out: FloatArray,
    relu: bool,
    key: int,
    epoch: int,
    threshold: int,
    scale: float,
    num_threads: int,
) -> None: ...
def relu_dropout_backward(
    d_out: FloatArray, activated: FloatArray, out: FloatArray, scale: float, num_threads: int
) -> None: ...
