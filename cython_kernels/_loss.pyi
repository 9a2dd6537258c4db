import numpy as np
import numpy.typing as npt

from .checks import FloatArray, IntArray

def softmax_cross_entropy(
    logits: FloatArray,
    labels: IntArray,
    mask: npt.NDArray[np.uint8],
    class_weights: npt.NDArray[np.float64],
    row_loss: npt.NDArray[np.float64],
    d_logits: FloatArray,
    with_gradient: bool,
    scale: float,
    num_threads: int,
) -> float: ...
def sigmoid_cross_entropy(
    logits: FloatArray,
    labels: npt.NDArray[np.uint8],
    mask: npt.NDArray[np.uint8],
    pos_weight: npt.NDArray[np.float64],
    row_loss: npt.NDArray[np.float64],
    d_logits: FloatArray,
    with_gradient: bool,
    scale: float,
    num_threads: int,
) -> float: ...
