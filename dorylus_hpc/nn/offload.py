"""What a dense group of stages needs and gives when a worker elsewhere computes it.

Stages say what they compute as ops over names. From the order of all stages follows which of these names
must travel: an array goes out if the group reads it before it makes it, and comes back if a later stage reads
it. What nobody reads later, such as the gradient of the logits where forward and backward of the last layer
are one group, never leaves the worker.

*Rematerialisation* (Dorylus, section 6): a backward that reads what a forward made from arrays which the
backward reads anyway makes it again instead of reading it. H1 = dropout(relu(M1 W1 + b1)) is needed for its
signs alone, and the backward of layer 1 has M1 and W1 already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dorylus_hpc.nn.program import (
    EDGE_ATTRIBUTES,
    LOSS,
    ROW_ATTRIBUTES,
    Pass,
    Program,
    Stage,
    gradient_of,
    inputs_of,
)
from lambda_pkg.ops import Op

TALLY = "tally"  # right and wrong answers of an interval, by set
_ANY = Pass(epoch=1, training=True, n_labelled=1)


@dataclass(frozen=True)
class DenseGroup:
    """A group of dense stages as a worker sees it.

    Attributes
    ----------
    name
        For people, and for what is known of such tasks: how long they take.
    stages
        In order, ops of earlier ones to be repeated first.
    rows
        Row tensors that go out.
    collected
        Of those that have what edges read: what the interval's edges do.
    edges
        Edges of the interval that go out.
    attributes
        Attributes of the vertices that go out.
    weights
        Weight tensors that go out.
    makes
        Row tensors that come back.
    gradients
        Weight tensors whose gradients come back.
    loss, counts
        Whether the loss, and the numbers of right and wrong answers, come back.
    logits
        Row tensor in which answers are counted.
    """

    name: str
    stages: tuple[Stage, ...]
    rows: tuple[str, ...]
    attributes: tuple[str, ...]
    weights: tuple[str, ...]
    makes: tuple[str, ...]
    gradients: tuple[str, ...]
    loss: bool
    counts: bool
    logits: str
    collected: tuple[str, ...] = ()
    edges: tuple[str, ...] = ()

    def ops(self, way: Pass, n_sets: int) -> list[Op]:
        """Return the program of a pass."""
        ops = _ops(self.stages, way)
        if self.counts:
            ops.append(_count(self.logits, n_sets))
        return ops


def plan_offload(
    program: Program,
    groups: Sequence[tuple[Stage, ...]],
    place: int,
    *,
    rematerialise: bool,
    counts: bool = False,
    keep: Iterable[str] = (),
) -> DenseGroup:
    """Derive what travels for one group.

    Parameters
    ----------
    program
        The model.
    groups
        The groups of the pass.
    place
        Which of them; every stage of it has ops.
    rematerialise
        Make again what would have to be read, where that needs nothing more.
    counts
        Also count right and wrong answers in the logits, which this group must make.
    keep
        Row tensors to bring back although no later stage reads them.
    """
    stages = groups[place]
    needed = {*keep}
    for later in groups[place + 1 :]:
        needed.update(_reads(program, later, rematerialise=rematerialise))
    if rematerialise:
        stages = (*_producers(program, stages), *stages)
    ops = _ops(stages, _ANY)
    if counts:
        ops.append(_count(program.logits, 1))
    reads = inputs_of(ops)
    made = {name: None for op in ops for name in op[3]}
    weights = {spec.name for spec in program.params}
    collected = {name for name, tensor in program.tensors.items() if tensor.collects}
    return DenseGroup(
        name="+".join(f"{stage.kind}{stage.layer}" for stage in groups[place]),
        stages=stages,
        rows=tuple(name for name in reads if name in program.tensors and name not in collected),
        attributes=tuple(name for name in reads if name in ROW_ATTRIBUTES),
        weights=tuple(name for name in reads if name in weights),
        makes=tuple(name for name in made if name in program.tensors and name in needed),
        gradients=tuple(spec.name for spec in program.params if gradient_of(spec.name) in made),
        loss=LOSS in made,
        counts=counts,
        logits=program.logits,
        collected=tuple(name for name in reads if name in collected),
        edges=tuple(name for name in reads if name in EDGE_ATTRIBUTES),
    )


def _count(logits: str, n_sets: int) -> Op:
    return ("tally", {"n_sets": n_sets}, [logits, "labels", "split"], [TALLY])


def _ops(stages: Iterable[Stage], way: Pass) -> list[Op]:
    ops: list[Op] = []
    for stage in stages:
        assert stage.ops is not None
        ops += stage.ops(way)
    return ops


def _made(ops: Iterable[Op]) -> set[str]:
    """Return the names that are made."""
    return {name for op in ops for name in op[3]}


def _reads(program: Program, group: tuple[Stage, ...], *, rematerialise: bool) -> set[str]:
    """Return the row tensors that a group reads, its own rows or neighbours'."""
    dense = [stage for stage in group if stage.ops is not None]
    if rematerialise and len(dense) == len(group):
        dense = [*_producers(program, dense), *dense]
    found = set(inputs_of(_ops(dense, _ANY)))
    for stage in group:
        found.update((*stage.reads, stage.tensor))
    return found


def _producers(program: Program, stages: Sequence[Stage]) -> list[Stage]:
    """Return earlier stages that make again what these read, from what these read anyway and weights.

    Not a stage whose product another one goes on with: it alone would make something else.
    """
    reads = inputs_of(_ops(stages, _ANY))
    there = {*reads, *ROW_ATTRIBUTES, *(spec.name for spec in program.params)}
    makers = Counter(name for stage in program.forward if stage.ops for name in _made(stage.ops(_ANY)))
    found = []
    for stage in program.forward:
        if stage.ops is None or stage in stages:
            continue
        ops = stage.ops(_ANY)
        made = _made(ops)
        sources = set(inputs_of(ops))
        if any(makers[name] > 1 for name in made):
            continue
        if made & set(reads) and not made & sources and sources <= there - made:
            found.append(stage)
    return found
