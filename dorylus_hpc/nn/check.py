"""What must hold of a program, before anything runs it."""

from __future__ import annotations

from collections.abc import Iterable

from dorylus_hpc.errors import InputError
from dorylus_hpc.nn.layers import FEATURES
from dorylus_hpc.nn.own import made_by
from dorylus_hpc.nn.program import (
    EDGE_ATTRIBUTES,
    INPUT,
    LOSS,
    ROW_ATTRIBUTES,
    Pass,
    Program,
    Stage,
    gradient_of,
    names_of,
)
from lambda_pkg.ops import check_program as check_ops

_KINDS = {
    "setup": ("LD", "SC", "GA"),
    "forward": ("GA", "AV", "SC", "AE", "RD"),
    "backward": ("dGA", "dAV", "dSC", "dAE", "RD"),
}
_GATHER = {"SC": "GA", "dSC": "dGA"}


def check_program(program: Program, *, n_classes: int = 0) -> None:
    """Refuse a program that is not consistent.

    Weights and row tensors have names of their own; stages read and make what exists; ghosts are there before
    a gather reads them; what has been sent is not written again; the output is as wide as there are classes.
    What functions compute is not looked at: `dorylus_hpc.model.check_gradients` does that.

    Parameters
    ----------
    program
        Of any layers.
    n_classes
        Width that the output must have; 0: any.

    Raises
    ------
    InputError
        With the first thing that is wrong.
    """
    _check_weights(program)
    for tensor in program.tensors.values():
        if tensor.width < 1:
            raise InputError(f"row tensor {tensor.name} must have at least 1 column, got {tensor.width}")
    for place in _KINDS:
        _check_stages(program, place)
    _check_exchanges(program, program.forward)
    _check_exchanges(program, program.backward)
    _check_sent((*program.forward, *program.backward))
    _check_order(program)
    if program.logits not in program.tensors:
        raise InputError(f"the output {program.logits} is no row tensor")
    output = program.tensors[program.logits]
    if n_classes and output.width != n_classes:
        raise InputError(f"the output {output.name} has {output.width} columns for {n_classes} classes")


def _check_weights(program: Program) -> None:
    seen: set[str] = set()
    if not program.params:
        raise InputError("the model has no weights: params() must return one at least")
    for spec in program.params:
        if spec.name in seen:
            raise InputError(f"two weights are called {spec.name}: give each a name of its own")
        seen.add(spec.name)
        for name in (spec.name, gradient_of(spec.name)):
            if name in program.tensors or name in (INPUT, FEATURES, LOSS, *ROW_ATTRIBUTES):
                raise InputError(f"weight {spec.name}: {name} is the name of a row tensor, too: change one")
        if not spec.shape or min(spec.shape) < 1:
            raise InputError(f"weight {spec.name} must have dimensions of at least 1, got {spec.shape}")
        if not 0 <= spec.draw < 256:
            raise InputError(f"weight {spec.name}: draw must be 0 to 255, got {spec.draw}")
    for name in {INPUT, FEATURES, LOSS, *ROW_ATTRIBUTES} & set(program.tensors):
        raise InputError(f"row tensor {name}: this name is taken: change it")


def _check_stages(program: Program, place: str) -> None:
    weights = {spec.name for spec in program.params}
    known = {*program.tensors, *weights, *map(gradient_of, weights), *ROW_ATTRIBUTES, LOSS, INPUT, FEATURES}
    known |= {*EDGE_ATTRIBUTES}
    for stage in getattr(program, place):
        told = describe(stage)
        if stage.kind not in _KINDS[place]:
            raise InputError(f"{told}: a stage of the {place} must be one of {', '.join(_KINDS[place])}")
        exchanges = stage.kind in _GATHER
        if exchanges != (stage.run is None):
            raise InputError(f"{told}: {'run must be None, the engine does it' if exchanges else 'no run'}")
        if exchanges and not stage.tensor:
            raise InputError(f"{told}: the row tensor to be sent is missing")
        if stage.ops is not None:
            try:
                check_ops(stage.ops(Pass(epoch=1, training=True, n_labelled=1)))
            except ValueError as error:
                raise InputError(f"{told}: {error}") from error
        for name in names_of(stage):
            if name not in known:
                raise InputError(f"{told} names {name}, which is no row tensor and no weight of the model")
        if stage.covers_ghosts:
            _check_covering(program, stage)
        tensor = program.tensors.get(stage.tensor)
        if stage.kind == "RD" and (tensor is None or not tensor.sums):
            raise InputError(f"{told}: the tensor of an RD must be one of sums, got {stage.tensor!r}")


def _check_covering(program: Program, stage: Stage) -> None:
    if stage.kind != "AV" or not stage.on_server:
        raise InputError(f"{describe(stage)}: only an AV on the server can cover ghosts")
    for name in made_by(stage) & set(program.tensors):
        if program.tensors[name].ghosts != "in":
            raise InputError(f"{describe(stage)} covers ghosts, but {name} has no rows for those of in-edges")


def _check_exchanges(program: Program, stages: Iterable[Stage]) -> None:
    """Every exchange is followed by its gather, every gather follows its exchange."""
    last, sent = None, set()
    for stage in stages:
        if last is not None and last.run is None:
            gather = _GATHER[last.kind]
            if stage.kind != gather or stage.tensor != last.tensor:
                raise InputError(f"{describe(last)} must be followed by the {gather} of {last.tensor}")
        if stage.run is None:
            if stage.tensor in sent:
                raise InputError(f"{describe(stage)}: {stage.tensor} was sent before: copy it into another")
            sent.add(stage.tensor)
        if stage.kind in ("GA", "dGA") and stage.tensor not in ("", FEATURES):
            wanted = "in" if stage.kind == "GA" else "out"
            tensor = program.tensors.get(stage.tensor)
            if tensor is None or tensor.ghosts != wanted:
                raise InputError(
                    f"{describe(stage)}: {stage.tensor} has no rows for the ghosts of {wanted}-edges"
                )
            covered = last is not None and last.covers_ghosts and wanted == "in"
            if last is None or not (last.run is None or covered):
                exchange = "an SC" if wanted == "in" else "a dSC"
                raise InputError(f"{describe(stage)}: {exchange} of {stage.tensor} must come before it")
        last = stage
    if last is not None and last.run is None:
        raise InputError(f"{describe(last)} has no {_GATHER[last.kind]} after it")


def _check_sent(stages: Iterable[Stage]) -> None:
    """Rows that others read do not change while they may still be reading."""
    sent: set[str] = set()
    for stage in stages:
        for name in sorted(made_by(stage) & sent):
            raise InputError(f"{describe(stage)} writes {name}, which others may still read: use another")
        if stage.kind in ("GA", "dGA") and stage.tensor:
            sent.add(stage.tensor)


def _check_order(program: Program) -> None:
    """What is read has been made, as far as stages tell; if one does not, it may have made anything."""
    made = {name for name, tensor in program.tensors.items() if tensor.constant}
    for stage in (*program.forward, *program.backward):
        steps: list[tuple[Iterable[str], Iterable[str]]] = [((stage.tensor, *stage.reads), stage.makes)]
        if stage.ops is not None:
            steps += [(op[2], op[3]) for op in stage.ops(Pass(epoch=1, training=True, n_labelled=1))]
        elif stage.run is not None and not stage.makes and not stage.covers_ghosts:
            return
        for reads, makes in steps:
            for name in reads:
                if name in program.tensors and name not in made:
                    raise InputError(f"{describe(stage)} reads {name}, which no stage before it makes")
            made.update(makes)


def describe(stage: Stage) -> str:
    """Return a stage in words."""
    function = getattr(stage.run, "function", stage.run)
    function = getattr(function, "func", function)  # of a partial
    name = "" if function is None else getattr(function, "__name__", "")
    return " ".join(filter(None, [f"layer {stage.layer}, {stage.kind}", stage.tensor, name]))
