"""What ``--data`` may name: a prepared folder, or a graph to be prepared for the ranks at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dorylus_hpc.comm.failure import together
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.manifest import read_manifest
from dorylus_hpc.graph.preparation import load_graph, prepare_folder

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

GRAPH_FOLDER = "graph"


def prepared_folder(
    comm: Intracomm,
    data: str | Path | GraphData | None,
    scratch: Path,
    *,
    parts: int,
    report: bool = False,
) -> Path:
    """Return a prepared folder for `data`, making one where it is not one yet. Collective.

    Parameters
    ----------
    comm
        All ranks; the first prepares.
    data
        A prepared folder, the path of a graph, the name of a data set, or a graph in memory. Only the
        first rank's counts.
    scratch
        Where to prepare: in the folder ``graph`` in it, which all ranks must be able to read.
    parts
        Parts to make.
    report
        Print what was changed and found.

    Raises
    ------
    AgreedError
        The data cannot be used, on all ranks.
    """

    def prepare() -> str:
        if comm.Get_rank() != 0:
            return ""
        assert data is not None
        if not isinstance(data, GraphData) and Path(data).is_dir():
            read_manifest(data)
            return str(data)
        graph = data if isinstance(data, GraphData) else load_graph(data)
        prepare_folder(
            graph,
            scratch / GRAPH_FOLDER,
            parts=parts,
            report=print if report else _silent,
        )
        return str(scratch / GRAPH_FOLDER)

    return Path(comm.bcast(together(comm, prepare)))


def _silent(*words: object) -> None:
    """Print nothing."""
