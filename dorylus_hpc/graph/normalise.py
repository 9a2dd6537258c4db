"""Scaling that a model applies around its gathers, from the degrees of the whole graph."""

from __future__ import annotations

import numpy as np

from dorylus_hpc.graph.partition import Adjacency, Part


def gcn_scales(part: Part, adjacency: Adjacency, *, source: str = "in") -> tuple[np.ndarray, np.ndarray]:
    """Row and source scales of GCN's ``D^-1/2 (A + I) D^-1/2``.

    Forward, over `part.in_edges`, a row is a destination and what it reads are sources. Backward, over
    `part.out_edges`, a row is a source and what it reads are destinations; the scales change places
    with them, so that the backward gather is the transpose of the forward one.

    Parameters
    ----------
    part : Part
    adjacency : Adjacency
        `part.in_edges` or `part.out_edges`.
    source : {'in', 'out'}
        Degree used for the source of an edge; the destination always has its in-degree. For a
        symmetric graph both are the same.

    Returns
    -------
    row_scale : ndarray of float64, shape (n_own,)
        ``1 / sqrt(degree + 1)`` of the own vertices.
    source_scale : ndarray of float64, shape (n_own + n_ghost,)
        The same for everything that a row reads, own vertices first.

    Raises
    ------
    ValueError
        For an adjacency of another part, or another `source`.

    Notes
    -----
    T. N. Kipf, M. Welling, *Semi-Supervised Classification with Graph Convolutional Networks*, ICLR
    2017. Degrees are weighted and without self loops; the added one is the model's own self term.
    """
    if source not in ("in", "out"):
        raise ValueError(f"source must be 'in' or 'out', got {source!r}")
    if adjacency is part.in_edges:
        row_kind, read_kind = "in", source
    elif adjacency is part.out_edges:
        row_kind, read_kind = source, "in"
    else:
        raise ValueError(f"the adjacency is neither in_edges nor out_edges of part {part.index}")
    own = {"in": part.in_degree, "out": part.out_degree}
    ghost = {"in": adjacency.ghost_in_degree, "out": adjacency.ghost_out_degree}
    read = np.concatenate([own[read_kind], ghost[read_kind]])
    return 1.0 / np.sqrt(own[row_kind] + 1.0), 1.0 / np.sqrt(read + 1.0)
