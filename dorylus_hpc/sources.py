"""What ``--data`` may name: a prepared folder, or a graph to be prepared for the ranks at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dorylus_hpc.comm.failure import together
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.manifest import read_manifest
from dorylus_hpc.graph.preparation import load_graph, prepare_folder

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

GRAPH_FOLDER = "graph"


def open_source(data: str | Path | GraphData) -> Path | GraphData:
    """Return the graph that `data` names, or the folder if it is prepared already.

    Raises
    ------
    InputError
        There is no such data, or something is wrong with it.
    """
    if isinstance(data, GraphData):
        return data
    try:
        is_folder = Path(data).is_dir()
    except OSError as error:  # no permission to look there, or too long a name
        raise InputError(f"--data {data}: cannot be read: {error.strerror}") from error
    if is_folder:
        read_manifest(data)
        return Path(data)
    return load_graph(data)


def prepared_folder(
    comm: Intracomm,
    source: Path | GraphData | None,
    scratch: Path,
    *,
    parts: int,
    report: bool = False,
) -> Path:
    """Return a prepared folder for a source, making one where it is not one yet. Collective.

    Parameters
    ----------
    comm
        All ranks; the first prepares.
    source
        From `open_source`; only the first rank's counts.
    scratch
        Where to prepare: in the folder ``graph`` in it, which all ranks must be able to read.
    parts
        Parts to make.
    report
        Print what was changed and found.

    Raises
    ------
    AgreedError
        The graph cannot be prepared, on all ranks.
    """

    def prepare() -> Path | None:
        if comm.Get_rank() != 0 or source is None or isinstance(source, Path):
            return source if isinstance(source, Path) else None
        if parts > source.n:
            raise InputError(
                f"{source.name} has {source.n} vert{'ices' if source.n > 1 else 'ex'}, too few for {parts} "
                f"graph servers: start at most {source.n}"
            )
        prepare_folder(source, scratch / GRAPH_FOLDER, parts=parts, report=print if report else _silent)
        return scratch / GRAPH_FOLDER

    folder = comm.bcast(together(comm, prepare))
    assert folder is not None
    return Path(folder)


def _silent(*words: object) -> None:
    """Print nothing."""
