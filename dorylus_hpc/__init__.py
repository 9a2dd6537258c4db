"""Full-graph training of graph neural networks on CPU clusters, with MPI and Cython.

`fit` and `infer` are the whole of it from Python; `dorylus_hpc.graph.readers.from_arrays` makes a graph of
arrays. Importing starts nothing: MPI is loaded at the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dorylus_hpc.errors import InputError

if TYPE_CHECKING:
    from dorylus_hpc.api import fit, infer

__version__ = "0.1.0"
__all__ = ["InputError", "__version__", "fit", "infer"]


def __getattr__(name: str) -> Any:
    """Load the functions that need MPI when they are first asked for."""
    if name in ("fit", "infer"):
        from dorylus_hpc import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
