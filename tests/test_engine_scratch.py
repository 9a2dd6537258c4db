"""Row tensors that a task makes and uses up: which they are, and the memory that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dorylus_hpc.engine import trial
from dorylus_hpc.engine.pages import Room
from dorylus_hpc.engine.scratch import Scratch, short_lived
from dorylus_hpc.nn.gat import gat_program
from dorylus_hpc.nn.gcn import gcn_program
from dorylus_hpc.nn.gin import gin_program
from dorylus_hpc.nn.layers import Choices
from dorylus_hpc.nn.own import complete
from dorylus_hpc.nn.program import Program, RowTensor, Stage, Task, fuse, names_of
from dorylus_hpc.nn.sage import sage_program

DEEP = {"norm": "layer", "residual": True, "jumping": "cat"}
MODELS = {
    "gcn": (gcn_program, "gcn"),
    "gcn, deep": (partial(gcn_program, **DEEP), "gcn"),
    "gcn, normalised": (partial(gcn_program, l2_normalise=True, jumping="max"), "gcn"),
    "gcn, batch norm": (partial(gcn_program, norm="batch"), "gcn"),
    "sage, batch norm": (partial(sage_program, norm="batch", jumping="cat"), "mean"),
    "gin, batch norm": (partial(gin_program, inner=5, norm="batch", residual=True), "sum"),
    "sage": (sage_program, "mean"),
    "sage, deep": (partial(sage_program, l2_normalise=True, **DEEP), "mean"),
    "sage, max": (partial(sage_program, aggregator="max", pool=5), "max"),
    "sage, max, deep": (partial(sage_program, aggregator="max", pool=5, **DEEP), "max"),
    "gin": (partial(gin_program, inner=5), "sum"),
    "gin, deep": (partial(gin_program, inner=5, **DEEP), "sum"),
    "gin, fixed": (partial(gin_program, inner=5, learns_epsilon=False), "sum-self"),
    "gat": (partial(gat_program, heads=2, output_heads=3), "attention"),
    "gat, dropout of edges": (partial(gat_program, heads=2, attention_dropout=0.4), "attention"),
    "gat, edges elsewhere": (partial(gat_program, heads=2, edges_elsewhere=True), "attention"),
    "gatv2": (partial(gat_program, heads=2, output_heads=3, second=True), "attention"),
    "gat, frugal": (partial(gat_program, heads=2, output_heads=3, frugal=True), "attention"),
    "gatv2, frugal": (
        partial(gat_program, heads=2, attention_dropout=0.4, second=True, frugal=True),
        "attention",
    ),
}
HOW: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "input dropout": {"input_dropout": 0.3},
    "transform-first": {"choices": Choices("transform-first")},
    "aggregate-first": {"choices": Choices("aggregate-first", constant_aggregate=False)},
    "sparse": {"sparse_features": True},
    "products exchanged": {"choices": Choices(ghost_products="exchange")},
    "products computed": {"choices": Choices(ghost_products="compute")},
}


def program(model: str = "gcn", **changes: Any) -> Program:
    options: dict[str, Any] = {
        "n_features": 6, "hidden": [5, 5], "n_classes": 4, "sparse_features": False, "dropout": 0.5,
        "input_dropout": 0.0, "weight_decay": 0.0, "decay_scope": "all", "seed": 3,
    }  # fmt: skip
    return MODELS[model][0](**(options | changes))


def groups(model: Program, kind: str = "train") -> list[tuple[Stage, ...]]:
    fused = model.training_groups() if kind == "train" else model.evaluation_groups()
    return [group for group in fused if group[0].run]


def named(model: Program, kind: str = "train", **options: Any) -> dict[str, tuple[str, ...]]:
    pieces = groups(model, kind)
    found = short_lived(model, pieces, **options)
    return {
        "+".join(f"{stage.kind}{stage.layer}" for stage in group): names
        for group, names in zip(pieces, found, strict=True)
    }


def test_what_one_group_alone_touches() -> None:
    model = program(hidden=[5])
    assert named(model) == {
        "AV1+AV2": (),  # H1 is read in the backward, Y2 by neighbours
        "GA2+AV2+AV2+dAV2": ("H2",),
        "dGA2+dAV2+dAV1+dAV1": ("dH1", "dY2"),
    }
    assert named(model, "evaluate") == {"AV1+AV2": ("H1",), "GA2+AV2": ("H2",)}
    assert named(model, "evaluate", keeps={-1: ["H2"]}) == {"AV1+AV2": ("H1",), "GA2+AV2": ()}
    assert named(model, "evaluate", keeps={1: ["H1"]})["AV1+AV2"] == ()
    assert named(model, keeps={-1: ["W1", "H2"]})["GA2+AV2+AV2+dAV2"] == ()  # weights travel, too


def test_what_is_made_anew_in_each_group() -> None:
    model = program(hidden=[5])
    tensors = {name: RowTensor(name, 3) for name in ("P", "Q", "R", "S")}
    model = replace(model, tensors=tensors)
    makes = Stage("AV", 1, lambda task: None, reads=("R",), makes=("P", "Q"))
    again = Stage("dAV", 1, lambda task: None, reads=("R",), makes=("P", "S"))
    takes = Stage("dAV", 1, lambda task: None, reads=("P", "Q"), makes=("Q",))
    adds = Stage("dAV", 1, lambda task: None, ops=lambda _: [("add_rows", {}, ["P", "S"], ["P"])])
    assert short_lived(model, [(makes,), (again, takes)]) == (("P",), ("P", "S"))
    assert short_lived(model, [(makes,), (again, takes)], keeps={0: ["P"]}) == (("P",), ("P", "S"))
    assert short_lived(model, [(makes,), (again, takes)], keeps={-1: ["P"]}) == ((), ("S",))
    assert short_lived(model, [(makes,), (takes, again)]) == ((), ("S",))
    assert short_lived(model, [(makes,), (again, adds)]) == (("P", "Q"), ("P", "S"))
    assert short_lived(model, [(makes,), (adds, again)]) == (("Q",), ("S",))


def test_a_frugal_attention_keeps_z_in_rows_of_q() -> None:
    options: dict[str, Any] = {"hidden": [5], "choices": Choices(ghost_products="exchange")}
    kept = {"Y1", "T1", "Z1.negative", "Q1", "dT1", "Y2", "T2", "Q2", "dT2"}
    unless = {"H1", "Z1", "Z1.max", "Z1.sum", "Z1.weight"}
    for model, more in (("gat", unless), ("gat, frugal", set())):
        made = program(model, **options)
        lent = {name for names in named(made).values() for name in names}
        assert set(made.tensors) - lent == kept | more
        lent = {name for names in named(made, "evaluate", keeps={-1: ["H2"]}).values() for name in names}
        evaluated = {name for name, tensor in made.tensors.items() if not tensor.trains_only}
        assert evaluated - lent == {"Y1", "T1", "Y2", "T2", "H2"}


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("attention_dropout", [0.0, 0.4])
def test_a_frugal_attention_makes_the_same_numbers(second: bool, attention_dropout: float) -> None:
    options = {"heads": 2, "second": second, "attention_dropout": attention_dropout}
    graph = trial.small_graph(6, 4)
    found = []
    for frugal in (False, True):
        common: dict[str, Any] = {
            "n_features": 6, "hidden": [5, 3], "n_classes": 4, "sparse_features": False, "dropout": 0.5,
            "input_dropout": 0.2, "weight_decay": 0.0, "decay_scope": "all", "seed": 3,
        }  # fmt: skip
        made = gat_program(**common, **options, frugal=frugal)  # type: ignore[arg-type]
        one, weights = trial.Trial(made, "attention", graph), trial.random_weights(made)
        found.append((*one.train(weights, epoch=2), one.evaluate(weights)))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])
    np.testing.assert_array_equal(found[0][2], found[1][2])


def test_others_who_do_not_tell_keep_all() -> None:
    model = program(hidden=[5])
    for untold in (
        complete(model),  # may have stages of one's own
        replace(model, forward=(*model.forward, Stage("AV", 2, lambda task: None))),
    ):
        assert not any(named(untold).values())


def test_edges_and_ghosts_read_what_is_not_theirs() -> None:
    model = program(hidden=[5])
    tensors = {name: RowTensor(name, 3) for name in ("P", "Q", "R", "S")}
    stages = [
        Stage("AV", 1, lambda task: None, makes=("P",), covers_ghosts=True),
        Stage("AE", 1, lambda task: None, reads=("Q", "S"), makes=("R",)),
        Stage("GA", 1, lambda task: None, tensor="S", makes=("S",)),
    ]
    plain = [replace(stages[0], covers_ghosts=False), replace(stages[1], kind="AV")]
    model = replace(model, tensors=tensors)
    assert short_lived(model, [(stage,) for stage in stages]) == ((), ("Q", "R"), ())  # S is gathered
    features = replace(stages[1], kind="RD")
    assert short_lived(model, [(stages[0],), (features,), (stages[2],)]) == ((), (), ())
    assert short_lived(model, [(stage,) for stage in plain]) == (("P",), ("Q", "R", "S"))
    once = replace(model, tensors={**tensors, "P": RowTensor("P", 3, constant=True)})
    assert short_lived(once, [plain])[0] == ("Q", "R", "S")


class Noting(dict[str, np.ndarray]):
    """Row tensors that note who is asked for."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.asked.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("model", MODELS)
def test_stages_tell_all_that_they_touch(monkeypatch: pytest.MonkeyPatch, model: str, how: str) -> None:
    made = program(model, **HOW[how])
    seen: list[str] = []

    def run(stage: Stage, task: Task) -> None:
        own, sources = Noting(task.tensors), Noting(task.sources)
        noting = replace(task, tensors=own, sources=sources)
        assert stage.run is not None
        stage.run(noting)
        task.loss = noting.loss
        told = set(names_of(stage))
        assert own.asked & set(made.tensors) <= told, stage
        whole = {tensor.name for tensor in made.tensors.values() if tensor.sums}
        gathered = {other.tensor for group in groups(made) for other in group if stage.kind == "dAE"}
        assert sources.asked <= {stage.tensor, *whole, *(told & gathered)}, stage
        if stage.ops is None and (made.tensors.keys() & told):
            assert stage.makes, stage
        seen.append(stage.kind)

    graph = trial.small_graph(6, 4, sparse=how == "sparse")
    one = trial.Trial(made, MODELS[model][1], graph)  # its set-up tells nothing, and need not
    monkeypatch.setattr(trial, "_run", run)
    weights = trial.random_weights(made)
    loss, _ = one.train(weights)
    one.evaluate(weights)
    assert {"GA", "dGA"} & set(seen)
    assert np.isfinite(loss)
    assert any(short_lived(made, groups(made)))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("model", MODELS)
def test_nobody_misses_what_is_gone(monkeypatch: pytest.MonkeyPatch, model: str, how: str) -> None:
    """With NaN in them before and after each group that owns them, losses and gradients are the same."""
    made = program(model, **HOW[how])
    graph, weights = trial.small_graph(6, 4, sparse=how == "sparse"), trial.random_weights(made)
    plain = trial.Trial(made, MODELS[model][1], graph)
    loss, gradient = plain.train(weights)
    rows = plain.evaluate(weights)
    owned = {
        kind: dict(zip(groups(made, kind), short_lived(made, groups(made, kind), keeps=keeps), strict=True))
        for kind, keeps in (("train", {}), ("evaluate", {-1: [made.logits]}))
    }
    run = trial._run

    def spoiling(stage: Stage, task: Task) -> None:
        found = owned["train" if task.training else "evaluate"].items()
        group, names = next((group, names) for group, names in found if any(one is stage for one in group))

        def spoil() -> None:
            for name in task.tensors.keys() & set(names):
                task.block(name)[...] = np.nan if task.block(name).dtype.kind == "f" else -7

        if stage is group[0]:
            spoil()
        run(stage, task)
        if stage is group[-1]:
            spoil()

    other = trial.Trial(made, MODELS[model][1], graph)
    monkeypatch.setattr(trial, "_run", spoiling)
    assert other.train(weights)[0] == loss
    np.testing.assert_array_equal(other.train(weights)[1], gradient)
    np.testing.assert_array_equal(other.evaluate(weights), rows)


def lending() -> Scratch:
    tensors = {
        "A": RowTensor("A", 5),
        "B": RowTensor("B", 3),
        "C": RowTensor("C", 64),
        "J": RowTensor("J", 7, dtype="int32"),
    }
    plan = {"train": [("A", "B"), (), ("C", "J")], "evaluate": [("C",)]}
    return Scratch(tensors, plan, np.float64, 1000, 2)


def test_lent_rows_are_those_of_the_interval() -> None:
    scratch = lending()
    assert scratch.names("train") == {"A", "B", "C", "J"}
    assert scratch.names("evaluate") == {"C"}
    assert scratch.names("setup") == frozenset()
    for start, stop, n_own in ((0, 10, 10), (3, 4, 1000), (990, 1000, 1000), (7, 7, 7)):
        for group in (0, 2):
            with scratch.lend("train", group, start, n_own) as arrays:
                assert list(arrays) == (["A", "B"] if group == 0 else ["C", "J"])
                for number, (name, array) in enumerate(arrays.items()):
                    assert array.shape == (n_own, {"A": 5, "B": 3, "C": 64, "J": 7}[name])
                    assert array.dtype == (np.int32 if name == "J" else np.float64)
                    assert array.flags.c_contiguous
                    assert start == stop or array[start:].ctypes.data % 64 == 0
                    array[start:stop] = number + 1
                for number, array in enumerate(arrays.values()):
                    assert (array[start:stop] == number + 1).all()
    with scratch.lend("train", 1, 0, 5) as nothing:
        assert nothing == {}
    with Scratch().lend("train", 0, 0, 5) as nothing:
        assert nothing == {}


def test_tasks_at_once_have_memory_of_their_own() -> None:
    scratch = lending()
    with ExitStack() as stack:
        lent = [stack.enter_context(scratch.lend("evaluate", 0, 10 * at, 1000))["C"] for at in range(4)]
        for at, array in enumerate(lent):
            array[10 * at : 10 * at + 10] = at
        for at, array in enumerate(lent):
            assert (array[10 * at : 10 * at + 10] == at).all()
    with pytest.raises(RuntimeError), scratch.lend("evaluate", 0, 0, 1000) as arrays:
        here = arrays["C"].ctypes.data
        raise RuntimeError
    with scratch.lend("evaluate", 0, 0, 1000) as arrays:  # what failed has given back, too
        assert arrays["C"].ctypes.data == here


def test_memory_is_that_of_the_tasks_that_run() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    rows, width, step = 1 << 20, 256, 1 << 12  # 1 GB, 4 MB an interval
    before = resident()
    scratch = Scratch({"A": RowTensor("A", width)}, {"train": [("A",)]}, np.float32, rows, 2)
    for start in range(0, rows, step):
        with scratch.lend("train", 0, start, rows) as arrays:
            arrays["A"][start : start + step] = start
    assert resident() - before < 32 << 20


def test_a_system_that_reserves_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Iterator[None]:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(Room, "__init__", none)
    with pytest.raises(OSError, match="Cannot allocate"):
        lending()


def test_groups_are_as_fused() -> None:
    """What the tests above take for groups is what the engine makes of stages."""
    model = program()
    assert groups(model) == [group for group in fuse((*model.forward, *model.backward)) if group[0].run]
