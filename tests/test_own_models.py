"""Models of one's own: the check of gradients and of programs, files that are wrong, runs and predictions."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from functools import partial

import graphs
import numpy as np
import pytest
from own_models import EXAMPLES, write_example

from dorylus_hpc import fit, infer, model
from dorylus_hpc.engine.own_model import own_model, read_model
from dorylus_hpc.engine.trial import compare_workers, small_graph
from dorylus_hpc.errors import InputError
from dorylus_hpc.model import OwnLayer, RowTensor, Stage, check_gradients, check_program, stack
from dorylus_hpc.nn.gat import gat_program
from dorylus_hpc.nn.gcn import gcn_program
from dorylus_hpc.nn.gin import gin_program
from dorylus_hpc.nn.layers import Choices
from dorylus_hpc.nn.program import Task
from dorylus_hpc.nn.sage import sage_program

DEEP = {
    "cat": {"norm": "layer", "residual": True, "jumping": "cat"},
    "max": {"norm": "layer", "residual": True, "jumping": "max"},
    "batch": {"norm": "batch", "residual": True, "jumping": "cat"},
}
BUILT_IN = {
    "gcn": (gcn_program, "gcn"),
    "sage mean": (sage_program, "mean"),
    "sage mean, normalised": (partial(sage_program, l2_normalise=True), "mean"),
    "sage gcn": (partial(sage_program, aggregator="gcn"), "mean-self"),
    "sage max": (partial(sage_program, aggregator="max", pool=3), "max"),
    "gin": (partial(gin_program, inner=3), "sum"),
    "gin, epsilon fixed": (partial(gin_program, inner=3, learns_epsilon=False), "sum-self"),
    **{
        f"{name}, {more}": (partial(build, **options), aggregate)
        for name, build, aggregate in (
            ("gcn", gcn_program, "gcn"),
            ("sage mean", sage_program, "mean"),
            ("gin", partial(gin_program, inner=3), "sum"),
        )
        for more, options in DEEP.items()
    },
    "sage max, batch": (partial(sage_program, aggregator="max", pool=3, norm="batch"), "max"),
    "sage max, all": (partial(sage_program, aggregator="max", pool=3, **DEEP["cat"]), "max"),
    "gat": (partial(gat_program, heads=2, output_heads=3, attention_dropout=0.3), "attention"),
    "gat, edges elsewhere": (
        partial(gat_program, heads=2, output_heads=3, edges_elsewhere=True),
        "attention",
    ),
    "gat, products exchanged": (
        partial(gat_program, heads=2, choices=Choices(ghost_products="exchange")),
        "attention",
    ),
}
OPTIONS = {
    "n_features": 5, "hidden": [4], "n_classes": 3, "sparse_features": False, "dropout": 0.4,
    "input_dropout": 0.0, "weight_decay": 0.0, "decay_scope": "all", "seed": 0,
}  # fmt: skip


@pytest.fixture
def gated(tmp_path):
    """Return a function that writes the gated sum with some of its text changed."""
    return lambda *changes, **more: write_example("GatedSum", tmp_path, *changes, **more)


# ---- gradients ----


@pytest.mark.parametrize("name", BUILT_IN)
def test_gradients_of_built_in_models(name):
    program, aggregate = BUILT_IN[name]
    deep = name.rpartition(", ")[2] in DEEP
    report = check_gradients(program, aggregate=aggregate, layers=[3 if deep else 2], hidden=3)
    assert report.ok, str(report)
    assert len(report.ways) == 3 and all(len(checks) >= 4 for checks in report.ways.values())


@pytest.mark.parametrize("name", EXAMPLES)
def test_gradients_of_the_examples(name, tmp_path, capsys):
    path = write_example(name, tmp_path)
    assert model.main([str(path), "--layers", "1", "2", "--hidden", "3"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == f"{name}: all gradients are right"
    assert sum("W1 (5, 3): largest error " in line for line in told) == 6
    assert not any("WRONG" in line for line in told)


def test_there_are_two_examples():
    assert sorted(EXAMPLES) == ["Appnp", "GatedSum"]


@pytest.mark.parametrize(
    ("example", "change", "wrong", "right"),
    [
        # A factor of one gradient: of the matrix that it belongs to, and of what comes before.
        ("GatedSum", ("s * (1 - s) * value", "s * value"), {"U1", "U2", "W1", "b1"}, {"W2", "b2"}),
        ("GatedSum", ("dY -> dV dG", "dY -> dG dV"), {"W1", "U1", "W2", "U2"}, {"b2"}),
        ("Appnp", ("d.sum(axis=0)", "d.sum(axis=0) * (1 + 1e-4)"), {"b2"}, {"W1", "W2", "b1"}),
        ("Appnp", ("return d_before, d_pred", "return d_gathered, d_pred"), {"W1", "W2", "b1", "b2"}, set()),
    ],
)
def test_a_wrong_gradient_is_found(example, change, wrong, right, tmp_path, capsys):
    path = write_example(example, tmp_path, change)
    report = check_gradients(path, layers=[2])
    assert not report.ok
    for checks in report.ways.values():
        found = {check.name for check in checks if not check.ok}
        assert wrong <= found and not found & right, (found, str(report))
    assert model.main([str(path), "--layers", "2"]) == 1
    told = capsys.readouterr().out
    assert "WRONG: gradient " in told and told.rstrip().endswith("GRADIENTS ARE WRONG")


def test_the_wrong_element_is_told(gated):
    path = gated(
        (
            "*self.products_backward",
            "self.vertices_backward(spoil, 'dV -> dV'),\n            *self.products_backward",
        ),
        ("class Gated", "def spoil(d):\n    d = d.copy()\n    d[:, 1] *= 1.5\n    return d\n\n\nclass Gated"),
    )
    (checks,) = [
        checks
        for way, checks in check_gradients(path, layers=[1]).ways.items()
        if way.endswith("dense features")
    ]
    wrong = next(check for check in checks if check.name == "W1")
    assert not wrong.ok and wrong.element[1] == 1
    assert wrong.gradient == pytest.approx(1.5 * wrong.difference, rel=1e-5)
    assert [check.ok for check in checks] == [False, True, True]  # W1, U1, b1


def test_reads_that_are_not_told_are_found_by_workers(gated):
    """What a stage reads beside what it tells is not there where dense work goes elsewhere."""
    own = read_model(str(gated()))
    program, graph = own.build(**OPTIONS), small_graph(5, 3)
    assert compare_workers(program, own.aggregate, graph) == ""
    forward = tuple(
        replace(stage, reads=("V2",)) if stage.reads == ("V2", "G2") else stage for stage in program.forward
    )
    backward = tuple(
        replace(stage, reads=("V2", "dY2")) if "G2" in stage.reads else stage for stage in program.backward
    )
    hiding = replace(program, forward=forward, backward=backward)
    assert compare_workers(hiding, own.aggregate, graph).startswith(
        "the loss of workers is nan, that of the "
    )


def test_ops_that_compute_something_else_are_found(gated):
    own = read_model(str(gated()))
    program, graph = own.build(**OPTIONS), small_graph(5, 3)
    changed = [
        replace(stage, ops=lambda way: [("relu_dropout_backward", {"p": 0.0}, ["dH1", "H1"], ["dH1"])])
        if stage.kind == "dAV" and stage.layer == 1 and stage.ops
        else stage
        for stage in program.backward
    ]
    told = compare_workers(replace(program, backward=tuple(changed)), own.aggregate, graph)
    assert told == "the gradient of W1 that workers make is not that of the server"


# ---- programs ----


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden": []},
        {"hidden": [4, 4, 4], "input_dropout": 0.3},
        {"sparse_features": True, "input_dropout": 0.3},
        {"n_classes": 9},
    ],
)
def test_built_in_programs_are_consistent(name, changes):
    options = OPTIONS | changes
    check_program(BUILT_IN[name][0](**options), n_classes=options["n_classes"])


def changed(**changes):
    return lambda program: replace(program, **{name: make(program) for name, make in changes.items()})


def without(kind):
    return lambda stages: tuple(stage for stage in stages if stage.kind != kind)


def first(stages, **changes):
    return (replace(stages[0], **changes), *stages[1:])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed(params=lambda p: ()), "the model has no weights"),
        (changed(params=lambda p: (*p.params, p.params[0])), "two weights are called W1"),
        (
            changed(params=lambda p: (*p.params, replace(p.params[0], name="Y2"))),
            "weight Y2: Y2 is the name of",
        ),
        (
            changed(params=lambda p: (*p.params, replace(p.params[0], name="H1"))),
            "weight H1: H1 is the name of",
        ),
        (
            changed(params=lambda p: (*p.params, replace(p.params[0], name="V", shape=()))),
            "weight V must have",
        ),
        (
            changed(tensors=lambda p: {**p.tensors, "Q": RowTensor("Q", 0)}),
            "row tensor Q must have at least 1 column, got 0",
        ),
        (
            changed(tensors=lambda p: {**p.tensors, "labels": RowTensor("labels", 1)}),
            "labels: this name is taken",
        ),
        (
            changed(forward=lambda p: without("GA")(p.forward)),
            "layer 2, SC Y2 must be followed by the GA of Y2",
        ),
        (changed(forward=lambda p: without("SC")(p.forward)), "an SC of Y2 must come before it"),
        (changed(backward=lambda p: without("dSC")(p.backward)), "a dSC of dH2 must come before it"),
        (
            changed(backward=lambda p: without("dGA")(p.backward)),
            "dSC dH2 must be followed by the dGA of dH2",
        ),
        (changed(forward=lambda p: (*p.forward, Stage("SC", 2, tensor="Y2"))), "Y2 was sent before"),
        (changed(forward=lambda p: (*p.forward, Stage("SC", 2, tensor="H1"))), "SC H1 has no GA after it"),
        (changed(forward=lambda p: (*p.forward, Stage("SC", 2))), "the row tensor to be sent is missing"),
        (changed(forward=lambda p: (*p.forward, Stage("AV", 2))), "layer 2, AV: no run"),
        (changed(forward=lambda p: (*p.forward, Stage("SC", 2, print, tensor="Y2"))), "run must be None"),
        (changed(forward=lambda p: p.backward), "a stage of the forward must be one of GA, AV, SC, AE"),
        (
            changed(forward=lambda p: (*p.forward, Stage("AV", 2, print, reads=("Q7",)))),
            "layer 2, AV print names Q7, which is no row tensor and no weight",
        ),
        (
            changed(forward=lambda p: first(p.forward, ops=lambda way: [("sing", {}, ["H1"], ["H1"])])),
            "unknown op ('sing'",
        ),
        (
            changed(backward=lambda p: (*p.backward, Stage("dAV", 1, print, makes=("dH2",)))),
            "dAV print writes dH2, which others may still read",
        ),
        (
            changed(tensors=lambda p: {**p.tensors, "Y2": RowTensor("Y2", 3)}),
            "Y2 has no rows for the ghosts of in-edges",
        ),
        (
            changed(forward=lambda p: first(p.forward, covers_ghosts=True, makes=("H1",), on_server=True)),
            "covers ghosts, but H1 has no rows",
        ),
        (
            changed(forward=lambda p: first(p.forward, covers_ghosts=True)),
            "only an AV on the server can cover",
        ),
        (changed(logits=lambda p: "H7"), "the output H7 is no row tensor"),
        (changed(logits=lambda p: "H1"), "the output H1 has 4 columns for 3 classes"),
    ],
)
def test_programs_that_are_not_consistent(change, said):
    program = gcn_program(**OPTIONS)  # [AV W1] | SC Y2 | [GA, loss] | dSC dH2 | [dGA, ...]
    with pytest.raises(InputError) as caught:
        check_program(change(program), n_classes=3)
    assert said in str(caught.value)


def test_layer_1_computes_ghosts_and_exchanges_nothing():
    for name, kinds in (("GatedSum", "AV AV AV GA AV"), ("Appnp", "AV AV")):
        space: dict = {}
        exec(EXAMPLES[name], space)
        program = stack(space[name], **OPTIONS)
        mine = [stage for stage in program.forward if stage.layer == 1]
        assert " ".join(stage.kind for stage in mine) == kinds
        assert [stage.covers_ghosts for stage in mine[:3]] == [name == "GatedSum"] * len(mine[:3])
        steps = 1 if name == "GatedSum" else 10
        assert [stage.tensor for stage in program.forward if stage.kind == "SC"] == (
            ["Y2"] if steps == 1 else ["Z2", *(f"E{k}2" for k in range(1, 10))]
        )
        assert program.tensors["dH1"].trains_only and not program.tensors["H1"].trains_only


def test_matrices_of_a_layer_start_with_different_values():
    space: dict = {}
    exec(EXAMPLES["GatedSum"], space)
    program = stack(space["GatedSum"], **OPTIONS)
    assert [(spec.name, spec.draw) for spec in program.params if len(spec.shape) == 2] == [
        ("W1", 0), ("U1", 1), ("W2", 0), ("U2", 1),
    ]  # fmt: skip


# ---- files that are wrong ----


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("def params(self):", "def params(self:"), "gatedsum.py:22: SyntaxError: "),
        (("import numpy as np", "import nampy"), "gatedsum.py:1: ModuleNotFoundError: No module"),
        (('"gcn"', '"median"'), "aggregate must tell what it takes from neighbours, one of gcn, mean"),
        (('    aggregate = "gcn"\n', ""), "aggregate must tell what it takes from neighbours"),
        (("def widths", "def breadths"), "layer 1, AV _multiply_features names V1, which is no row tensor"),
        (("def backward", "def back"), "the methods backward are missing"),
        (("(OwnLayer)", ""), "must have one class derived from Layer, or a function build, but has none"),
        (("self.bias()]", "]"), "layer 1, AV activate names b1, which is no row tensor and no weight"),
        (("self.bias()]", "'b']"), "params() must return a list of ParamSpec, but a str is in it"),
        (("*self.finish(),", "self.finish(),"), "forward() must return a list of Stage, but a list is in it"),
        (('"G": self.f_out,', '"G": self.f_out + 1,'), "AV _multiply_features: ValueError: out must have"),
        (('self.matrix("U")', 'self.matrix("W")'), "two weights are called W1: give each a name"),
        (('"V G -> Y"', '"V G"'), "names must be like 'V b -> Y', got 'V G'"),
        (('"V G -> Y"', '"V G -> Q"'), "which is no row tensor"),
        (('"V G -> Y"', '"input G -> Y"'), "layer 1 has features for its input: multiply them first"),
        (("return sigmoid(gate) * value", "return sigmoid(gate)[:, :1]"), "message (V1 G1 -> Y1): Y1 has"),
        (("return sigmoid(gate) * value", "return 1 / 0"), "gatedsum.py:11: layer 1, AV message: ZeroDiv"),
        (("return sigmoid(gate) * value", "return value, gate"), "must return 1 arrays, but returned 2"),
        (('self.gather("Y", "H"),', ""), "layer 1, AV activate reads H1, which no stage before it makes"),
        (('self.gather_backward("dH", "dY"),', ""), "dAV message_backward reads dY2, which no stage before"),
        (('backward(V="W", G="U")', 'backward(V="W")'), "the gradient of U1 is not finite on a small graph"),
        (("*self.finish(),", "*self.finish()[:1],"), "layer 2, dAV output_gradient reads dH2, which no"),
        (("*self.finish(),", '*self.finish(), self.vertices(sigmoid, "dY -> dY")'), "AV sigmoid reads dY"),
        (("value\n\n\ndef message_b", "value.max()\n\n\ndef message_b"), "ValueError: zero-size array"),
        (('    aggregate = "gcn"', '    aggregate = "max"'), "layer 1: gather computes gcn, mean"),
        (('self.gather("Y", "H")', 'self.gather("dY", "H")'), "dGA dH2 _gather_backward writes dY2, which"),
    ],
)  # fmt: skip
def test_files_that_are_wrong(gated, change, said):
    path = gated(change)
    with pytest.raises(InputError) as caught:
        read_model(str(path)).attempt(**OPTIONS)
    text = str(caught.value)
    assert text.startswith(str(path)) and said in text and "\n" not in text, text


def test_names_in_a_file(gated, tmp_path):
    two = gated(
        ("class GatedSum(OwnLayer):", "class Other(OwnLayer):\n    pass\n\n\nclass GatedSum(OwnLayer):")
    )
    with pytest.raises(InputError, match="but has the classes Other, GatedSum: name the one that is meant"):
        read_model(str(two))
    assert read_model(f"{two}:GatedSum").name == "GatedSum"
    with pytest.raises(InputError, match="has no Gated$"):
        read_model(f"{two}:Gated")
    with pytest.raises(InputError, match="must be a class derived from Layer, or a function"):
        read_model(f"{two}:np")
    with pytest.raises(InputError, match=r"no\.py: the file of the model cannot be read \(No such file"):
        read_model(str(tmp_path / "no.py"))


def test_a_function_builds_a_model_of_different_layers(tmp_path):
    """A gated layer, and a GCN behind it, with an aggregate for all."""
    text = EXAMPLES["GatedSum"].replace("import OwnLayer", "import OwnLayer, assemble, plan_layers")
    text += """

class Linear(OwnLayer):
    def params(self):
        return [self.matrix("W"), self.bias()]

    def forward(self):
        return [*self.products(H="W"), *self.finish()]

    def backward(self):
        return [*self.finish_backward(), *self.products_backward(H="W")]


aggregate = "mean-self"


def build(*, n_features, hidden, n_classes, sparse_features, **options):
    places = plan_layers([n_features, *hidden, n_classes], **options)
    kinds = [Linear] + [GatedSum] * (len(places) - 1)
    layers = [kind(**place) for kind, place in zip(kinds, places, strict=True)]
    return assemble(layers, sparse_features=sparse_features)
"""
    path = tmp_path / "mixed.py"
    path.write_text(text)
    found = read_model(str(path))
    assert (found.name, found.aggregate) == ("build", "mean-self")
    assert [spec.name for spec in found.build(**OPTIONS).params] == ["W1", "b1", "W2", "U2", "b2"]
    report = check_gradients(path, layers=[1, 3], hidden=3)
    assert report.ok, str(report)
    path.write_text(text.replace("return assemble(layers, sparse_features=sparse_features)", "return layers"))
    with pytest.raises(InputError, match="it must return a Program, but returned list"):
        read_model(str(path)).build(**OPTIONS)


class AddsToItsInput(OwnLayer):
    """Gathers its input where it is no first layer: D W + P D, added up in both directions."""

    aggregate = "sum"

    def params(self):
        return [self.matrix("W"), self.bias()]

    def forward(self):
        more = [] if self.first else [self.gather("input", "H", adds=True)]
        return [*self.products(H="W"), *more, *self.finish()]

    def backward(self):
        more = [] if self.first else [self.gather_backward("dH", "d_input")]
        products = self.products_backward(H="W", adds=not self.first)
        return [*self.finish_backward(), *more, *products]


class Halved(OwnLayer):
    """With a stage as in the docstring of `dorylus_hpc.model`."""

    aggregate = "mean"

    def params(self):
        return [self.matrix("W"), self.bias()]

    def widths(self):
        return {"Y": self.f_out}

    def forward(self):
        norm = Stage("AV", self.index, self.halve, reads=(self.named("Y"),), makes=(self.named("Y"),))
        return [*self.products(Y="W"), norm, self.gather("Y", "H"), *self.finish()]

    def backward(self):
        gathered = self.gather_backward("dH", "dY")
        halved = self.vertices_backward(lambda d: 0.5 * d, "dY -> dY")
        return [*self.finish_backward(), gathered, halved, *self.products_backward(Y="W")]

    def halve(self, task):
        block = task.block(self.named("Y"))
        np.multiply(block, 0.5, out=block)


def test_stages_beside_functions():
    report = check_gradients(Halved, layers=[1, 2])
    assert report.ok, str(report)
    program = own_model(Halved).build(**OPTIONS)
    assert [stage.covers_ghosts for stage in program.forward[:3]] == [True, True, False]
    told = inspect.getdoc(model)
    assert "".join(inspect.getsource(Halved.forward).split()) in "".join(told.split())
    assert "".join(inspect.getsource(Halved.halve).split()) in "".join(told.split())


def test_wide_layers_are_tried_too(gated):
    """Weights of a trial are of a size that no exponential overflows."""
    naive = ("return 0.5 + 0.5 * np.tanh(0.5 * x)", "return 1 / (1 + np.exp(-x))")
    options = OPTIONS | {"n_features": 3000, "hidden": [512, 512, 512]}
    read_model(str(gated(naive))).attempt(**options)


def test_gathers_of_the_layer_before_and_sums_in_place():
    def build(**options):
        return stack(AddsToItsInput, **(options | {"hidden": [options["n_classes"]] * 2}))

    report = check_gradients(build, aggregate="sum", layers=[3])
    assert report.ok, str(report)
    program = own_model(build, aggregate="sum").build(**OPTIONS)
    assert program.tensors["H1"].ghosts == "in" and program.tensors["dH3"].ghosts == "out"


class Exchanged(OwnLayer):
    """Its functions return what they were given, in the place of something else that they make."""

    aggregate = "gcn"

    def params(self):
        return [self.matrix("W"), self.matrix("U"), self.bias()]

    def widths(self):
        return {"Y": self.f_out, "Z": self.f_out}

    def forward(self):
        return [
            *self.products(Y="W", Z="U"),
            self.vertices(lambda y, z: (z, y), "Y Z -> Y Z"),
            self.gather("Y", "H"),
            self.vertices(lambda h, z: h + np.tanh(z), "H Z -> H"),
            *self.finish(),
        ]

    def backward(self):
        return [
            *self.finish_backward(),
            self.gather_backward("dH", "dY"),
            self.vertices_backward(lambda d, z: d * (1 - np.tanh(z) ** 2), "dH Z -> dZ"),
            self.vertices_backward(lambda d_y, d_z: (d_z, d_y), "dY dZ -> dY dZ"),
            *self.products_backward(Y="W", Z="U"),
        ]


def test_functions_may_return_what_they_were_given():
    report = check_gradients(Exchanged, layers=[1, 2])
    assert report.ok, str(report)
    stages = stack(Exchanged, **OPTIONS | {"hidden": []}).forward
    exchange = next(stage for stage in stages if stage.makes == ("Y1", "Z1"))
    y, z = np.array([[0.0], [1.0]]), np.array([[2.0], [3.0]])
    task = Task(None, (0, 2), {"Y1": y, "Z1": z}, {}, {}, {}, epoch=1, training=True, n_labelled=1)
    exchange.run(task)
    assert y.ravel().tolist() == [2, 3] and z.ravel().tolist() == [0, 1]


# ---- runs ----


@pytest.fixture
def trained(gated, tmp_path):
    path = gated()
    graph, run_dir = graphs.directed_random(), tmp_path / "run"
    options = {"epochs": 4, "hidden": 6, "dtype": "float64", "trace_events": 0}
    result = fit(graph, model_file=path, run_dir=run_dir, **options)
    return path, graph, run_dir, result


def test_predictions_need_only_the_run(trained, tmp_path):
    path, graph, run_dir, result = trained
    assert (run_dir / "model.py").read_bytes() == path.read_bytes()
    assert result.summary["config"]["model_file"] == str(path)
    path.unlink()
    predictions = infer(run_dir)
    test = graph.split == 3
    right = (predictions.classes[test] == graph.labels[test]).mean()
    assert right == result.summary["test_accuracy"]["best_validation"]
    kept = run_dir / "model.py"
    kept.write_text(kept.read_text() + "\n")
    with pytest.raises(InputError, match="model.py is not the file that the model was trained with"):
        infer(run_dir)
    kept.unlink()
    with pytest.raises(InputError, match="model.py: the file of the model cannot be read"):
        infer(run_dir)


def test_a_class_that_was_imported_from_a_file(trained, tmp_path, monkeypatch):
    path, graph, _, result = trained
    monkeypatch.syspath_prepend(tmp_path)
    from gatedsum import GatedSum  # type: ignore[import-not-found]

    options = {"epochs": 4, "hidden": 6, "dtype": "float64", "trace_events": 0}
    again = fit(graph, model_file=GatedSum, run_dir=tmp_path / "again", **options)
    assert again.summary["weights_sha256"] == result.summary["weights_sha256"]
    assert again.summary["config"]["model_file"] == f"{path}:GatedSum"
    sys.modules.pop("gatedsum")
    space: dict = {"__name__": "__main__"}
    exec(EXAMPLES["GatedSum"], space)
    with pytest.raises(InputError, match="'?GatedSum'? must be imported from a file"):
        fit(graph, model_file=space["GatedSum"], run_dir=tmp_path / "not", **options)


def test_wrong_command_lines_of_the_check(capfd, tmp_path):
    assert model.main([str(tmp_path / "no.py")]) == 2
    assert "no.py: the file of the model cannot be read" in capfd.readouterr().err
    assert model.main(["x.py", "--layers", "0"]) == 2
    assert model.main([]) == 2


def test_the_public_module_offers_what_it_names():
    assert all(hasattr(model, name) for name in model.__all__)
    assert np.array_equal(sorted(model.__all__), model.__all__)
