"""Graph kernels: arrays in, arrays out.

Each public function is a checked door before a typed loop that checks nothing, holds no GIL and
uses OpenMP. Arrays are C-contiguous (those of attention may also be columns of wider matrices); floating
arrays of one call share one dtype, float32 or float64. Features may be stored in bfloat16 and in tiles of
columns. Each kernel has a slow twin of the same name and arguments in `cython_kernels.reference`.

Beside what is listed here, `cython_kernels.ordering` has orders of the vertices (`community_order`),
`cython_kernels.layout` makes arrays that begin at a cache line (`empty`, `empty_tiles`), and
`cython_kernels.dispatch` tells and forces the instruction set (`using`).
"""

import os

try:
    from ._build import build_info, end_threads
except ModuleNotFoundError as error:
    if error.name != f"{__name__}._build":
        raise
    # A source folder in the current folder hides an installed package.
    _clone = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    raise ImportError(
        f"the compiled modules of cython_kernels are missing in {_clone}: run `pip install -e .` there, "
        "or start Python in another folder if the package is installed elsewhere"
    ) from None

from .activation import bias_elu_dropout, bias_relu_dropout, elu_dropout_backward, relu_dropout_backward
from .aggregate import check_csr, gather, gather_adjoint, gather_max, gather_max_adjoint
from .bfloat16 import from_bfloat16, to_bfloat16
from .dropout_masks import dropout, dropout_csr, philox4x32
from .graph_attention import (
    AttentionSaved,
    attention,
    attention_adjoint,
    attention_saved,
    attention_targets,
    attention_weights,
)
from .graph_attention_v2 import (
    AttentionV2Saved,
    attention_v2,
    attention_v2_adjoint,
    attention_v2_saved,
    attention_v2_targets,
)
from .layout import Tiles, choose_layout, from_tiles, to_tiles
from .loss import sigmoid_cross_entropy, softmax_cross_entropy
from .max_pull import gather_max_pull, pack_max
from .narrow import narrow_product, narrow_product_adjoint
from .rows import pack_rows, scatter_add_rows, unpack_rows
from .transpose import Transposed, transpose_csr

__all__ = [
    "AttentionSaved",
    "AttentionV2Saved",
    "Tiles",
    "Transposed",
    "attention",
    "attention_adjoint",
    "attention_saved",
    "attention_targets",
    "attention_v2",
    "attention_v2_adjoint",
    "attention_v2_saved",
    "attention_v2_targets",
    "attention_weights",
    "bias_elu_dropout",
    "bias_relu_dropout",
    "build_info",
    "check_csr",
    "choose_layout",
    "dropout",
    "dropout_csr",
    "elu_dropout_backward",
    "from_bfloat16",
    "from_tiles",
    "gather",
    "gather_adjoint",
    "gather_max",
    "gather_max_adjoint",
    "gather_max_pull",
    "narrow_product",
    "narrow_product_adjoint",
    "pack_max",
    "pack_rows",
    "philox4x32",
    "relu_dropout_backward",
    "scatter_add_rows",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
    "to_bfloat16",
    "to_tiles",
    "transpose_csr",
    "unpack_rows",
]

if hasattr(os, "register_at_fork"):  # so that kernels work in the processes of multiprocessing and os.fork
    os.register_at_fork(before=end_threads)
