from .checks import FloatArray, IntArray

def philox(
    level: int, c0: int, c1: int, c2: int, c3: int, key0: int, key1: int
) -> tuple[int, int, int, int]: ...
def dropout_csr(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray,
    gids: IntArray,
    out: FloatArray,
    key: int,
    epoch: int,
    threshold: int,
    scale: float,
    level: int,
    num_threads: int,
) -> None: ...
