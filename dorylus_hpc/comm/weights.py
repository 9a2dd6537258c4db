"""Weights on the wire: pull, push, publish. Planned once; all sizes are known from the layout.

    graph server   <-- pull ----  its parameter server      the whole version, one message
    graph server   --- push --->  owner of each segment     the part's partial gradient, a message a part
    owner          - publish -->  other parameter servers   the segment's new version

With no parameter servers the graph servers play both sides; the messages are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dorylus_hpc.comm.roles import Placement, Roles
from dorylus_hpc.comm.tags import Kind, tag
from dorylus_hpc.comm.waiting import wait_all
from dorylus_hpc.nn.params import FlatLayout

if TYPE_CHECKING:
    from mpi4py.MPI import Request


class WeightClient:
    """A graph server's side.

    Parameters
    ----------
    roles
        Ranks by role.
    layout
        The flat vector and its owners.
    dtype
        Of the weights.
    """

    def __init__(self, roles: Roles, layout: FlatLayout, dtype: np.dtype) -> None:
        self._comm, self._layout = roles.comm, layout
        self._owners = list(roles.weight_ranks)
        self._server = self._owners[roles.rank % len(self._owners)]
        self._pulled = np.zeros(layout.size, dtype)
        self._pushes: list[Request] = []

    def pull(self, version: int) -> tuple[np.ndarray, float]:
        """Fetch a version.

        Parameters
        ----------
        version
            Number of updates behind it; the parameter server must be serving that one.

        Returns
        -------
        flat : ndarray
            The weights, valid until the next pull.
        seconds : float
            Time waited.
        """
        request = self._comm.Irecv(self._pulled, source=self._server, tag=tag(Kind.PULL, epoch=version))
        return self._pulled, wait_all([request])

    def push(self, epoch: int, part: int, gradient: np.ndarray) -> None:
        """Start to send a part's partial gradient to the owners; `flush` before changing it.

        Parameters
        ----------
        epoch
            The epoch of the gradient, from 1.
        part
            The part: owners add partials in the order of parts.
        gradient
            Flat, like the weights.
        """
        for owner, (start, stop) in zip(self._owners, self._layout.segments, strict=True):
            if start < stop:
                stamp = tag(Kind.PUSH, epoch=epoch, layer=part)
                self._pushes.append(self._comm.Isend(gradient[start:stop], dest=owner, tag=stamp))

    def flush(self) -> float:
        """Wait until all pushes have left; return the seconds waited."""
        waited = wait_all(self._pushes)
        self._pushes = []
        return waited


class WeightServer:
    """The transport of a rank that owns weights; what is done with them is the caller's.

    Parameters
    ----------
    roles, layout, dtype
        As for `WeightClient`.
    placement
        Which graph server hosts which part.
    """

    def __init__(self, roles: Roles, layout: FlatLayout, placement: Placement, dtype: np.dtype) -> None:
        self._comm, self._layout, self._placement = roles.comm, layout, placement
        self._owners = list(roles.weight_ranks)
        self.owner = self._owners.index(roles.rank)
        self.segment = layout.segments[self.owner]
        self._clients = [rank for rank in range(roles.n_graph) if rank % len(self._owners) == self.owner]
        self._partials = np.zeros((placement.n_parts, self.segment[1] - self.segment[0]), dtype)
        self._sends: list[Request] = []
        self._receives: list[Request] = []

    def offer(self, version: int, flat: np.ndarray) -> None:
        """Start to send a version to the bound graph servers; `flat` must not change until `collect`."""
        stamp = tag(Kind.PULL, epoch=version)
        self._sends = [self._comm.Isend(flat, dest=client, tag=stamp) for client in self._clients]

    def expect(self, epoch: int) -> None:
        """Post the receives of an epoch's partial gradients of this rank's segment, one a part."""
        if self.segment[0] < self.segment[1]:
            self._receives = [
                self._comm.Irecv(
                    self._partials[part],
                    source=self._placement.host(part),
                    tag=tag(Kind.PUSH, epoch=epoch, layer=part),
                )
                for part in range(self._placement.n_parts)
            ]

    def collect(self) -> np.ndarray:
        """Wait for what `offer` and `expect` started.

        Returns
        -------
        ndarray, (n_parts, segment)
            The partial gradients by part, valid until the next `expect`.
        """
        wait_all([*self._sends, *self._receives])
        self._sends, self._receives = [], []
        return self._partials

    def publish(self, version: int, flat: np.ndarray) -> None:
        """Send this rank's segment of a new version to the other owners and receive theirs. Collective."""
        stamp = tag(Kind.PUBLISH, epoch=version)
        requests = []
        for owner, (start, stop) in enumerate(self._layout.segments):
            if owner == self.owner or start == stop:
                continue
            requests.append(self._comm.Irecv(flat[start:stop], source=self._owners[owner], tag=stamp))
        start, stop = self.segment
        if start < stop:
            requests += [
                self._comm.Isend(flat[start:stop], dest=rank, tag=stamp)
                for rank in self._owners
                if rank != self._owners[self.owner]
            ]
        wait_all(requests)
