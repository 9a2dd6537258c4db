"""Predictions of a trained model for every vertex of a prepared folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dorylus_hpc.comm.failure import together
from dorylus_hpc.comm.reduce import gather_rows
from dorylus_hpc.comm.roles import assign_roles
from dorylus_hpc.config import make_config
from dorylus_hpc.engine.checkpoint import SavedModel
from dorylus_hpc.engine.executor import Executor
from dorylus_hpc.engine.loading import load_graph
from dorylus_hpc.engine.model import build_program, load_settings, resolve_intervals
from dorylus_hpc.engine.own_model import OwnModel
from dorylus_hpc.engine.resources import threads_per_rank
from dorylus_hpc.engine.runner import Runner
from dorylus_hpc.engine.trainer import check_parts
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.manifest import Manifest, read_manifest
from dorylus_hpc.graph.store import read_structure
from dorylus_hpc.nn.params import plan_layout

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@dataclass(frozen=True, eq=False)
class Predictions:
    """One row a vertex, in the order of the input.

    Attributes
    ----------
    ids : ndarray, (n,)
        The user's own ids.
    classes : ndarray, (n,), int32, or (n, n_classes), uint8
        The most probable class; or, of a model of several classes a vertex, 1 for each class of a probability
        above 1/2 and 0 for the others.
    probabilities : ndarray, (n, n_classes), float32
        They add up to 1 where a vertex has one class.
    """

    ids: np.ndarray
    classes: np.ndarray
    probabilities: np.ndarray


def predict(
    comm: Intracomm,
    model: SavedModel,
    which: str,
    folder: Path,
    threads: int = 0,
    *,
    own: OwnModel | None = None,
) -> Predictions | None:
    """Run a model forward, without dropout. Collective.

    Parameters
    ----------
    comm
        All ranks; each is a graph server.
    model
        From the run's checkpoint.
    which
        ``best`` or ``last`` weights.
    folder
        A prepared folder: of the training graph or of another with the same features.
    threads
        Of each rank; 0 for its share of the cores.
    own
        The model, if it is the user's own.

    Returns
    -------
    Predictions on rank 0, None elsewhere.

    Raises
    ------
    AgreedError
        The folder does not fit the model, on all ranks.
    """
    roles = assign_roles(comm, 0)

    def checked() -> Manifest:
        manifest = read_manifest(folder)
        check_parts(manifest, roles, folder)
        if manifest.features != model.features:
            raise InputError(
                f"{folder} has {manifest.features} features a vertex, but the model was trained with "
                f"{model.features}: predict on data with the same features"
            )
        return manifest

    manifest = together(comm, checked)
    config = replace(make_config(model.config), place="ae=server")
    program = together(
        comm,
        lambda: build_program(
            config,
            n_features=manifest.features,
            n_classes=model.classes,
            sparse_features=manifest.feature_kind == "csr",
            own=own,
        ),
    )
    with Executor(threads or threads_per_rank(comm)) as executor:
        settings = load_settings(config, own, program)
        graph = load_graph(comm, folder, manifest, settings, columns=model.columns, executor=executor)
        runner = Runner(
            graph,
            program,
            plan_layout(program.params, 1),
            executor,
            dtype=np.dtype(config.dtype),
            intervals=resolve_intervals(config, manifest, program),
            trains=False,
            saves_memory=config.save_memory == "on",
        )
        runner.counts_evaluation = False  # the labels may be of another kind, and nobody asks
        runner.evaluate(model.weights[which])
        runner.close()
    rows = [probabilities(runner.logits(part.index), several=model.several) for part in graph.parts]
    table = gather_rows(comm, graph.placement, rows, [entry.own for entry in manifest.parts])
    return None if table is None else _in_input_order(folder, manifest, table, several=model.several)


def probabilities(logits: np.ndarray, *, several: bool = False) -> np.ndarray:
    """Return the softmax of each row, float32, computed in double precision; of several classes sigmoids.

    An answer is never rounded away: the class of the largest logit has the largest probability, and a class
    of several more than 1/2 if its logit is above 0.
    """
    if several:
        decay = np.exp(-np.abs(logits.astype(np.float64)))
        found = (np.where(logits > 0, 1.0, decay) / (1.0 + decay)).astype(np.float32)
        above = np.nextafter(np.float32(0.5), np.float32(1))
        return np.maximum(found, above, out=found, where=logits > 0)
    shifted = logits - logits.max(axis=1, keepdims=True, initial=-np.inf)
    exponentials = np.exp(shifted.astype(np.float64))
    found = (exponentials / exponentials.sum(axis=1, keepdims=True)).astype(np.float32)
    if found.size:
        answers = logits.argmax(axis=1)
        rounded = np.flatnonzero(found.argmax(axis=1) != answers)
        found[rounded, answers[rounded]] = np.nextafter(found[rounded].max(axis=1), np.float32(1))
    return found


def _in_input_order(folder: Path, manifest: Manifest, table: np.ndarray, *, several: bool) -> Predictions:
    """Put rows that come part after part in the order of the input, beside their ids."""
    parts = [read_structure(folder, manifest, index, verify=False)[0] for index in range(len(manifest.parts))]
    gids = np.concatenate([part.gid for part in parts])
    ids = np.concatenate([part.ids for part in parts if part.n_own])
    order = np.argsort(gids)
    table = table[order]
    classes = (table > 0.5).astype(np.uint8) if several else table.argmax(axis=1).astype(np.int32)
    return Predictions(ids[order], classes, table)
