"""From a configuration to a model and its weights' layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from dorylus_hpc.config import TrainConfig
from dorylus_hpc.engine.intervals import interval_count
from dorylus_hpc.engine.loading import LoadSettings
from dorylus_hpc.engine.own_model import OwnModel
from dorylus_hpc.graph.manifest import Manifest
from dorylus_hpc.nn.gat import gat_program
from dorylus_hpc.nn.gcn import gcn_program
from dorylus_hpc.nn.gin import gin_program
from dorylus_hpc.nn.layers import Choices
from dorylus_hpc.nn.optim import Optimizer, make_optimizer
from dorylus_hpc.nn.program import Program
from dorylus_hpc.nn.sage import sage_program

ATTENTION = ("gat", "gatv2")


def build_program(
    config: TrainConfig,
    *,
    n_features: int,
    n_classes: int,
    sparse_features: bool,
    own: OwnModel | None = None,
) -> Program:
    """Return the stage program of a configuration for a graph of these widths.

    Parameters
    ----------
    config
        Depth, widths, and what else the model wants to know.
    n_features, n_classes, sparse_features
        Of the graph.
    own
        The model of ``config.model_file``; it is tried on a small graph first.

    Raises
    ------
    InputError
        Something is wrong with a model of the user's own.
    """
    common: dict[str, Any] = {
        "n_features": n_features,
        "hidden": [config.hidden] * (config.layers - 1),
        "n_classes": n_classes,
        "sparse_features": sparse_features,
        "dropout": config.dropout,
        "input_dropout": config.input_dropout,
        "weight_decay": config.weight_decay,
        "decay_scope": config.decay_scope,
        "seed": config.seed,
    }
    if own is not None:
        own.attempt(**common)
        return own.build(**common)
    choices = Choices(config.layer_order, config.constant_aggregate == "on", config.ghost_products)
    more: dict[str, Any] = {
        "norm": config.norm, "residual": config.residual == "on", "jumping": config.jumping,
        "choices": choices,
    }  # fmt: skip
    if config.model == "sage":
        normalises = config.l2_normalise == "on"
        return sage_program(
            **common, **more, aggregator=config.aggregator, pool=config.hidden, l2_normalise=normalises
        )
    if config.model == "gin":
        learns = config.epsilon == "learned"
        return gin_program(**common, **more, inner=config.hidden, learns_epsilon=learns)
    if config.model in ATTENTION:
        return gat_program(
            **common,
            heads=config.heads,
            output_heads=config.output_heads,
            slope=config.negative_slope,
            attention_dropout=config.attention_dropout,
            second=config.model == "gatv2",
            edges_elsewhere=config.place == "ae=lambda",
            frugal=config.save_memory == "on" and config.backend == "cpu" and config.mode != "async",
            choices=choices,
        )
    return gcn_program(**common, **more)


def aggregate_of(config: TrainConfig, own: OwnModel | None = None) -> str:
    """Return what the model of a configuration takes from neighbours (`dorylus_hpc.graph.normalise`)."""
    if own is not None:
        return own.aggregate
    if config.model == "sage":
        return {"mean": "mean", "gcn": "mean-self", "max": "max"}[config.aggregator]
    if config.model == "gin":
        return "sum" if config.epsilon == "learned" else "sum-self"
    if config.model in ATTENTION:
        return "attention"
    return "gcn"


def build_optimizer(config: TrainConfig) -> Optimizer:
    """Return the optimizer of a configuration."""
    options: dict[str, Any] = {"lr": config.lr}
    return make_optimizer(config.optimizer, **options)


def load_settings(
    config: TrainConfig, own: OwnModel | None = None, program: Program | None = None
) -> LoadSettings:
    """Return how a configuration wants a graph to be read; without a program, with features of ghosts."""
    return LoadSettings(
        np.dtype(config.dtype),
        config.feature_norm,
        config.source_degree,
        aggregate_of(config, own),
        ghost_features=program is None or program.reads_ghost_features,
    )


def resolve_intervals(config: TrainConfig, manifest: Manifest, program: Program) -> int:
    """Return the intervals a part: as configured, or by the cost model for the largest part.

    A function of the prepared folder and the model alone, so that results do not depend on the ranks.
    """
    if config.intervals:
        return config.intervals
    work = program.gathered, program.product
    return max(interval_count(part.own, part.in_edges, *work) for part in manifest.parts)
