"""Which rank is what: graph servers first, then parameter servers; and which rank hosts which part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dorylus_hpc.errors import InputError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@dataclass(frozen=True)
class Placement:
    """Assignment of parts to graph servers: contiguous, as even as can be.

    Attributes
    ----------
    n_parts, n_servers
        Parts, and graph servers to share them; n_parts >= n_servers.
    """

    n_parts: int
    n_servers: int

    def hosted(self, server: int) -> range:
        """Return the parts of a graph server."""
        return range(
            server * self.n_parts // self.n_servers,
            (server + 1) * self.n_parts // self.n_servers,
        )

    def host(self, part: int) -> int:
        """Return the graph server of a part."""
        return int(np.searchsorted([self.hosted(s).stop for s in range(self.n_servers)], part, side="right"))


@dataclass(frozen=True)
class Roles:
    """The job's ranks by role.

    Attributes
    ----------
    comm
        All ranks of the job.
    n_graph
        Ranks 0 .. n_graph - 1 are graph servers.
    n_parameter
        The ranks after them are parameter servers; with 0, the graph servers hold the weights.
    """

    comm: Intracomm
    n_graph: int
    n_parameter: int

    @property
    def rank(self) -> int:
        """This rank."""
        return self.comm.Get_rank()

    @property
    def is_graph_server(self) -> bool:
        """True if this rank hosts parts."""
        return self.rank < self.n_graph

    @property
    def weight_ranks(self) -> range:
        """Ranks that own weights."""
        if self.n_parameter:
            return range(self.n_graph, self.n_graph + self.n_parameter)
        return range(self.n_graph)

    @property
    def owns_weights(self) -> bool:
        """True if this rank owns weights."""
        return self.rank in self.weight_ranks

    def name(self, rank: int) -> str:
        """Return the role of a rank in words."""
        return "graph server" if rank < self.n_graph else "parameter server"


def assign_roles(comm: Intracomm, servers: int) -> Roles:
    """Split a job's ranks into graph servers and parameter servers.

    Parameters
    ----------
    comm
        All ranks.
    servers
        Parameter servers asked for. A job of one rank holds its weights itself.

    Raises
    ------
    InputError
        No rank would be left to be a graph server.
    """
    size = comm.Get_size()
    if size == 1:
        servers = 0
    if servers >= size:
        raise InputError(
            f"--servers {servers} leaves no graph server among {size} ranks: start at least {servers + 1} "
            f"ranks (mpirun -n {servers + 1} ...) or lower --servers"
        )
    return Roles(comm, size - servers, servers)
