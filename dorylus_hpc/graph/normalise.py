"""Scaling that a model applies around its gathers, from the degrees of the whole graph.

What a vertex takes from the sources of its in-edges, by the name of its *aggregate*:

    gcn         their symmetrically normalised sum, itself included
    mean        their mean; zero without in-edges
    mean-self   the mean of them and of itself
    sum         their sum
    sum-self    the sum of them and of itself
    max         the largest value of each column
    attention   a sum with weights that the model makes, itself included

Edge weights count in sums and means only; an edge of a vertex to itself would be of weight 1.
"""

from __future__ import annotations

import numpy as np

from dorylus_hpc.graph.partition import Adjacency, Part

AGGREGATES = ("gcn", "mean", "mean-self", "sum", "sum-self", "max", "attention")

Scale = np.ndarray | None  # float64, or ones


def edge_scales(
    aggregate: str, part: Part, adjacency: Adjacency, *, forward: bool, source: str = "in"
) -> tuple[Scale, Scale, float]:
    """Row scale, source scale and weight of the self term of one direction of a part.

    Parameters
    ----------
    aggregate : str
        One of `AGGREGATES`.
    part : Part
    adjacency : Adjacency
        `part.in_edges`, or `part.out_edges` where `forward` is False. The backward gather is the transpose of
        the forward one: of a mean, which divides by the degree of the destination, it is not the same even
        where the graph is symmetric.
    forward : bool
        Rows are destinations.
    source : {'in', 'out'}
        As for `gcn_scales`.

    Returns
    -------
    row_scale, source_scale : ndarray of float64, or None
        Of the own vertices, and of everything that a row reads; None: ones.
    self_weight : float

    Raises
    ------
    ValueError
        Another aggregate, or as for `gcn_scales`.
    """
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate must be one of {', '.join(AGGREGATES)}, got {aggregate!r}")
    itself = 1.0 if aggregate == "gcn" or aggregate.endswith("-self") else 0.0
    if aggregate == "gcn":
        return *gcn_scales(part, adjacency, source=source), itself
    if not aggregate.startswith("mean"):
        return None, None, itself
    if forward:
        return _inverse(part.in_degree + itself), None, itself
    read = np.concatenate([part.in_degree, adjacency.ghost_in_degree])
    return None, _inverse(read + itself), itself


def _inverse(degree: np.ndarray) -> np.ndarray:
    return np.divide(1.0, degree, out=np.zeros_like(degree), where=degree > 0)


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
