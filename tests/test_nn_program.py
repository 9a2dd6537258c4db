"""The stage program of a GCN: which stages, in which order, fused how."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dorylus_hpc.nn.gat import gat_program
from dorylus_hpc.nn.gcn import gcn_program
from dorylus_hpc.nn.gin import gin_program
from dorylus_hpc.nn.layers import Choices, exchanges_products
from dorylus_hpc.nn.program import Program, Stage, fuse
from dorylus_hpc.nn.sage import sage_program


def program(**changes: Any) -> Program:
    settings: dict[str, Any] = {
        "n_features": 100,
        "hidden": [16],
        "n_classes": 7,
        "sparse_features": False,
        "dropout": 0.5,
        "input_dropout": 0.0,
        "weight_decay": 1e-3,
        "decay_scope": "first",
        "seed": 0,
    }
    return gcn_program(**settings | changes)


def words(groups: Any) -> list[str]:
    return [" ".join(f"{stage.kind}{stage.layer}" for stage in group) for group in groups]


def test_constant_input_is_aggregated_once() -> None:
    model = program()
    assert model.orders == ("aggregate-first", "transform-first")
    assert words(model.setup_groups()) == ["LD1", "SC1", "GA1"]
    assert words(model.training_groups()) == [
        "AV1 AV2",
        "SC2",
        "GA2 AV2 AV2 dAV2",
        "dSC2",
        "dGA2 dAV2 dAV1 dAV1",
    ]
    assert words(model.evaluation_groups()) == ["AV1 AV2", "SC2", "GA2 AV2"]


def test_aggregate_takes_the_place_of_features_that_nobody_else_reads() -> None:
    assert program().replaces_input == "M1"
    for changes in (
        {"residual": True, "hidden": [16, 16]},
        {"input_dropout": 0.5},
        {"sparse_features": True},
        {"choices": Choices("aggregate-first", constant_aggregate=False)},
        {"choices": Choices("transform-first")},
    ):
        assert program(**changes).replaces_input == ""


def test_sparse_input_is_transformed_first_and_its_forward_never_exchanges() -> None:
    model = program(sparse_features=True, input_dropout=0.5)
    assert model.orders == ("transform-first", "transform-first")
    assert model.setup == ()
    assert words(model.training_groups()) == [
        "AV1 AV1",
        "GA1 AV1 AV2",
        "SC2",
        "GA2 AV2 AV2 dAV2",
        "dSC2",
        "dGA2 dAV2 dAV1",
        "dSC1",
        "dGA1 dAV1",
    ]


@pytest.mark.parametrize(
    ("features", "hidden", "order"),
    [(48, 16, "aggregate-first"), (49, 16, "transform-first"), (16, 16, "aggregate-first")],
)
def test_dropped_dense_input_takes_the_order_with_fewer_columns(
    features: int, hidden: int, order: str
) -> None:
    # Aggregate-first gathers f_in; transform-first gathers f_out twice and sends it once.
    assert program(n_features=features, hidden=[hidden], input_dropout=0.1).orders[0] == order


def test_hidden_layers_take_the_narrower_side() -> None:
    model = program(hidden=[8, 32], n_classes=40)
    assert model.orders == ("aggregate-first",) * 3
    assert {name for name, tensor in model.tensors.items() if tensor.ghosts == "in"} == {"H1", "H2"}
    assert {name for name, tensor in model.tensors.items() if tensor.ghosts == "out"} == {"dM2", "dM3"}
    assert model.tensors["dM3"].width == 32


def other(declare: Any, **changes: Any) -> Program:
    settings: dict[str, Any] = {
        "n_features": 100,
        "hidden": [16],
        "n_classes": 7,
        "sparse_features": False,
        "dropout": 0.5,
        "input_dropout": 0.0,
        "weight_decay": 1e-3,
        "decay_scope": "all",
        "seed": 0,
    }
    return declare(**settings | changes)  # type: ignore[no-any-return]


def test_sage_takes_the_narrower_side_and_the_constant_mean() -> None:
    model = other(sage_program)
    assert model.orders == ("aggregate-first", "transform-first")
    assert words(model.setup_groups()) == ["LD1", "SC1", "GA1"]
    assert words(model.training_groups()) == [
        "AV1 AV1 AV2",
        "SC2",
        "GA2 AV2 AV2 dAV2",
        "dSC2",
        "dGA2 dAV2 dAV1 dAV1 dAV1",
    ]
    assert {name: t.width for name, t in model.tensors.items() if t.ghosts} == {"Y2": 7, "dH2": 7}
    wider = other(sage_program, n_classes=40)
    assert {name: t.width for name, t in wider.tensors.items() if t.ghosts} == {"H1": 16, "dM2": 16}


def test_max_sends_where_values_came_from_beside_their_gradients() -> None:
    model = other(sage_program, aggregator="max", pool=16)
    assert words(model.training_groups()) == [
        "AV1",
        "GA1 AV1 AV1 AV2",
        "SC2",
        "GA2 AV2 AV2 dAV2 dAV2 dAV2",
        "dSC2",
        "dGA2 dAV2 dAV2 dAV1 dAV1 dAV1",
        "dSC1",
        "dGA1 dAV1 dAV1",
    ]
    sent = {"P1": 16, "P2": 16, "Q1": 32, "Q2": 32}
    assert {name: t.width for name, t in model.tensors.items() if t.ghosts} == sent


@pytest.mark.parametrize("learns", [True, False])
def test_gin_gathers_before_its_first_product_or_after_it(learns: bool) -> None:
    model = other(gin_program, inner=16, learns_epsilon=learns)
    assert model.orders == ("aggregate-first", "transform-first")
    assert words(model.setup_groups()) == ["LD1", "SC1", "GA1"]
    assert words(model.training_groups())[-2:] == ["dSC2", words(model.training_groups())[-1]]
    assert {name: t.width for name, t in model.tensors.items() if t.ghosts} == {"Y2": 16, "dR2": 16}
    assert {spec.name for spec in model.params if spec.decay} == {"U1", "W1", "U2", "W2"}
    assert ("e1" in {spec.name for spec in model.params}) == learns


@pytest.mark.parametrize("declare", [gcn_program, sage_program, partial(gin_program, inner=16)])
def test_an_order_that_was_chosen_is_that_of_all_layers_that_have_the_choice(declare: Any) -> None:
    for order in ("aggregate-first", "transform-first"):
        chosen = {"choices": Choices(order=order)}
        assert other(declare, hidden=[8, 32], **chosen).orders == (order,) * 3
        sparse = other(declare, sparse_features=True, **chosen)
        assert sparse.orders == ("transform-first", order)


def test_an_aggregate_of_features_may_be_computed_in_every_epoch() -> None:
    model = program(choices=Choices("aggregate-first", constant_aggregate=False))
    assert words(model.setup_groups()) == ["LD1", "SC1", "LD1"]
    assert words(model.training_groups())[0].startswith("GA1 AV1")
    assert not any(tensor.constant for tensor in model.tensors.values())
    narrower = program(n_features=10, hidden=[16], choices=Choices(constant_aggregate=False))
    wider = program(n_features=100, hidden=[16], choices=Choices(constant_aggregate=False))
    assert (narrower.orders[0], wider.orders[0]) == ("aggregate-first", "transform-first")


def test_gat_packs_scores_beside_what_they_weigh() -> None:
    model = other(gat_program, heads=4, output_heads=2, choices=Choices(ghost_products="compute"))
    assert model.orders == ("transform-first", "transform-first")
    assert words(model.training_groups()) == [
        "AV1",
        "GA1 AV1 AV2",
        "SC2",
        "GA2 AV2 AV2 dAV2 dAE2",
        "dSC2",
        "dGA2 dAV2 dAV1 dAE1",
        "dSC1",
        "dGA1 dAV1",
    ]
    sent = {"Y1": 4 * 16 + 4, "Y2": 2 * 7 + 2, "Q1": 4 * 16 + 16, "Q2": 2 * 7 + 8}
    assert {name: t.width for name, t in model.tensors.items() if t.ghosts and name != "T1"} == sent
    assert {spec.name for spec in model.params if not spec.decay} == {"b1", "b2"}


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_products_of_ghosts_are_exchanged_or_computed(second: bool, sparse: bool, dropped: float) -> None:
    def made(how: str) -> Program:
        return other(
            gat_program, heads=4, second=second, sparse_features=sparse, input_dropout=dropped,
            choices=Choices(ghost_products=how),
        )  # fmt: skip

    exchanged, computed = made("exchange"), made("compute")
    first = "AV1 AV1" if dropped else "AV1"
    groups = words(computed.training_groups())
    assert groups[:2] == [first, words(exchanged.training_groups())[2]]
    assert words(exchanged.training_groups()) == [first, "SC1", *groups[1:]]
    assert words(exchanged.evaluation_groups())[:2] == ["AV1", "SC1"]
    assert words(computed.evaluation_groups())[:2] == ["AV1", words(exchanged.evaluation_groups())[2]]
    assert words(computed.setup_groups()) == ([] if sparse else ["LD1", "SC1", "LD1"])
    assert words(exchanged.setup_groups()) == ([] if sparse else ["LD1"])
    assert computed.reads_ghost_features and not exchanged.reads_ghost_features
    covering = {"T1": replace(exchanged.tensors["T1"], ghosts="in")}  # rows that are there, and not sent
    assert computed.tensors == exchanged.tensors | covering


def test_products_of_ghosts_are_exchanged_of_many_dense_features() -> None:
    for how, few, many, sparse in (
        ("auto", False, True, False),
        ("exchange", True, True, True),
        ("compute", False, False, False),
    ):
        choices = Choices(ghost_products=how)
        assert exchanges_products(80, sparse=False, choices=choices) == few
        assert exchanges_products(81, sparse=False, choices=choices) == many
        assert exchanges_products(10_000, sparse=True, choices=choices) == sparse
    assert exchanges_products(81, sparse=False)


def test_programs_tell_whether_they_read_features_of_ghosts() -> None:
    assert program().reads_ghost_features  # once, in the set-up
    assert program(input_dropout=0.5).reads_ghost_features
    assert program(n_features=1000, input_dropout=0.5).orders[0] == "transform-first"
    assert program(n_features=1000, input_dropout=0.5).reads_ghost_features
    assert program(sparse_features=True).reads_ghost_features


@pytest.mark.parametrize("dropped", [0.0, 0.1])
def test_a_gat_that_drops_weights_of_edges_differs_in_evaluation(dropped: float) -> None:
    model = other(gat_program, heads=1, dropout=0.0, attention_dropout=dropped)
    assert model.differs_in_evaluation == (dropped > 0)


def test_decay_is_on_weight_matrices_of_the_chosen_layers() -> None:
    decays = {spec.name: spec.decay for spec in program(decay_scope="all").params}
    assert decays == {"W1": 1e-3, "b1": 0.0, "W2": 1e-3, "b2": 0.0}
    assert {spec.name for spec in program().params if spec.decay} == {"W1"}


def test_evaluation_differs_only_where_dropout_acts() -> None:
    assert program().differs_in_evaluation
    assert not program(dropout=0.0).differs_in_evaluation
    assert not program(hidden=[], dropout=0.5).differs_in_evaluation  # no hidden layer to drop
    assert program(hidden=[], dropout=0.0, input_dropout=0.1).differs_in_evaluation


def test_stages_that_cover_ghosts_are_not_fused_with_others() -> None:
    def nothing(task: Any) -> None: ...

    covering = Stage("AV", 1, nothing, covers_ghosts=True)
    plain = Stage("AV", 2, nothing)
    assert fuse([covering, covering, plain, plain]) == ((covering, covering), (plain, plain))
