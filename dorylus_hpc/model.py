"""What a model of one's own is made of, and a check of its gradients.

A file for ``--model-file`` takes all that it needs from here. Most derive one class from `OwnLayer`; a
function ``build(**options)`` may instead return a `Program`, made with `stack` or `assemble` of layers of any
kind. ::

    python -m dorylus_hpc.model FILE[:NAME]

compares the gradient of every weight with finite differences.

============================================  ==========================================================
`OwnLayer`                                    base class of a layer whose stages are functions of arrays
`Layer`                                       base class of the built-in layers: stages alone
`stack`, `assemble`                           a program of layers of one class, or of any
`complete`                                    what follows from stages; the others call it
`plan_layers`                                 place, widths, dropout: the arguments of each layer
`Program`, `Stage`, `RowTensor`, `ParamSpec`  what a model is made of
`gradient_of`, `load_stages`                  names of gradients; the set-up of dense features
`Task`, `PartOperands`, `EdgeOperand`         what the function of a stage gets; `Pass` for its ops
`check_program`, `check_gradients`            what must hold of a program; finite differences
============================================  ==========================================================

A stage of any kind may stand beside those that the methods of `OwnLayer` make. It does what it likes with
the rows of one interval, and should tell what it reads and makes, by the names in the program::

    def forward(self):
        norm = Stage("AV", self.index, self.halve, reads=(self.named("Y"),), makes=(self.named("Y"),))
        return [*self.products(Y="W"), norm, self.gather("Y", "H"), *self.finish()]

    def halve(self, task):
        block = task.block(self.named("Y"))
        np.multiply(block, 0.5, out=block)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dorylus_hpc.comm.failure import write_line
from dorylus_hpc.config import make_parser
from dorylus_hpc.engine.own_model import OwnModel, own_model, read_model
from dorylus_hpc.engine.trial import TensorCheck, compare_gradients, compare_workers, small_graph
from dorylus_hpc.errors import InputError
from dorylus_hpc.nn.check import check_program
from dorylus_hpc.nn.layers import Layer, plan_layers
from dorylus_hpc.nn.operands import DropoutKey, EdgeOperand, PartOperands
from dorylus_hpc.nn.own import OwnLayer, assemble, complete, stack
from dorylus_hpc.nn.params import ParamSpec
from dorylus_hpc.nn.program import (
    Pass,
    Program,
    RowTensor,
    Stage,
    Task,
    gradient_of,
    load_stages,
)

__all__ = [
    "DropoutKey",
    "EdgeOperand",
    "GradientReport",
    "InputError",
    "Layer",
    "OwnLayer",
    "ParamSpec",
    "PartOperands",
    "Pass",
    "Program",
    "RowTensor",
    "Stage",
    "Task",
    "TensorCheck",
    "assemble",
    "check_gradients",
    "check_program",
    "complete",
    "gradient_of",
    "load_stages",
    "plan_layers",
    "stack",
]

PROGRAM = "python -m dorylus_hpc.model"
FEATURES, CLASSES = 5, 3  # of the graph of a check
# Of the settings that are checked: features sparse, dropout of features.
_WAYS = ((False, 0.0), (False, 0.3), (True, 0.3))


@dataclass(frozen=True)
class GradientReport:
    """What `check_gradients` found.

    Attributes
    ----------
    name
        Of the model.
    ways : dict
        By the settings that were checked, in words: one `TensorCheck` a weight tensor.
    workers : dict
        By the same: what differs where dense stages run by their ops, in words; empty if nothing does.
    """

    name: str
    ways: dict[str, list[TensorCheck]]
    workers: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether everything is right."""
        return all(check.ok for checks in self.ways.values() for check in checks) and not any(
            self.workers.values()
        )

    def __str__(self) -> str:
        """Return a line a tensor, and one that sums up."""
        lines = []
        for way, checks in self.ways.items():
            lines += [f"{way}:", *(f"  {check}" for check in checks)]
            if self.workers[way]:
                lines.append(f"  WRONG: {self.workers[way]}")
        told = "all gradients are right" if self.ok else "GRADIENTS ARE WRONG"
        return "\n".join([*lines, f"{self.name}: {told}"])


def check_gradients(
    model: str | Path | type[Layer] | Callable[..., Program],
    *,
    aggregate: str = "",
    layers: Sequence[int] = (1, 3),
    hidden: int = 4,
    dropout: float = 0.4,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> GradientReport:
    """Compare every weight's gradient with finite differences, elementwise, in float64.

    A small directed graph with isolated vertices, cut into two parts and several intervals, one of them
    empty, goes through the program in this process: with dense features, with dropout on them, and with
    sparse ones. Dropout is on: masks of an epoch are always the same.

    Parameters
    ----------
    model
        ``FILE.py`` or ``FILE.py:NAME``; or a class derived from `Layer`; or a function that takes the
        arguments of `stack` by name and returns a `Program`.
    aggregate
        What its edges want, if it does not say so itself.
    layers
        Numbers of layers to check.
    hidden
        Width of hidden layers.
    dropout
        On hidden layers.
    tolerance
        Largest error of an element, relative to the largest of its tensor.
    seed
        Of graph, weights and dropout.

    Returns
    -------
    GradientReport

    Raises
    ------
    InputError
        The model cannot be read, or its program is not consistent.

    Examples
    --------
    >>> from functools import partial
    >>> from dorylus_hpc.nn.gin import gin_program
    >>> check_gradients(partial(gin_program, inner=4), aggregate="sum", layers=[1]).ok
    True
    """
    own: OwnModel = (
        read_model(str(model)) if isinstance(model, str | Path) else own_model(model, aggregate=aggregate)
    )
    ways: dict[str, list[TensorCheck]] = {}
    workers: dict[str, str] = {}
    for count in layers:
        for sparse, input_dropout in _WAYS:
            options: dict[str, Any] = {
                "n_features": FEATURES, "hidden": [hidden] * (count - 1), "n_classes": CLASSES,
                "sparse_features": sparse, "dropout": dropout, "input_dropout": input_dropout,
                "weight_decay": 0.0, "decay_scope": "all", "seed": seed,
            }  # fmt: skip
            own.attempt(**options)
            program, graph = own.build(**options), small_graph(FEATURES, CLASSES, sparse=sparse, seed=seed)
            way = f"{count} layer{'s' * (count > 1)}, {'sparse' if sparse else 'dense'} features"
            way += f" with dropout {input_dropout}" if input_dropout else ""
            ways[way] = compare_gradients(program, own.aggregate, graph, tolerance=tolerance, seed=seed)
            workers[way] = compare_workers(program, own.aggregate, graph, seed=seed)
    return GradientReport(own.name, ways, workers)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = make_parser(PROGRAM, "Compare the gradients of a model of your own with finite differences.")
    parser.add_argument("model", metavar="FILE[:NAME]", help="file of the model, as for train --model-file")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[1, 3], help="numbers of layers to check; default 1 3"
    )
    parser.add_argument("--hidden", type=int, default=4, help="width of the hidden layers; default 4")
    parser.add_argument("--seed", type=int, default=0, help="seed of graph, weights and dropout; default 0")
    options = parser.parse_args(arguments)
    if min(*options.layers, options.hidden) < 1 or options.seed < 0:
        raise InputError("--layers and --hidden must be at least 1, --seed at least 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Check a file; return 0 if its gradients are right, 1 if not, 2 for wrong input."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        report = check_gradients(
            options.model, layers=options.layers, hidden=options.hidden, seed=options.seed
        )
    except InputError as error:
        write_line(f"{PROGRAM}: error: {error}")
        return 2
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
