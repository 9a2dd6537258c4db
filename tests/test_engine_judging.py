"""What rank 0 tells the weight servers of evaluations, and when it must say nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dorylus_hpc.config import make_config
from dorylus_hpc.engine.graph_server import GraphServer
from dorylus_hpc.engine.weights import Verdict
from dorylus_hpc.report.metrics import Evaluation, History


def told(*, exact: bool, first: int, accuracies: dict[int, float], **options: Any) -> list[tuple[int, ...]]:
    """Let versions be judged in turn; return (version, verdict, phase) of the letters."""
    letters: list[tuple[int, ...]] = []
    history = History(evaluations=[Evaluation(version, val=val) for version, val in accuracies.items()])
    server = object.__new__(GraphServer)
    server._config = make_config({"mode": "async", "target_accuracy": 0.8, **options})
    server._service = SimpleNamespace(judged=lambda version: True, servers=(3,))  # type: ignore[assignment]
    server._registrar = SimpleNamespace(advance=lambda: list(accuracies), history=history)  # type: ignore[assignment]
    server._mailbox = SimpleNamespace(send=lambda to, kind, *numbers: letters.append(numbers))  # type: ignore[assignment]
    server._exact, server._first, server._verdict = exact, first, Verdict.GO_ON
    server._judge()
    return letters


def test_every_judgement_is_told_where_servers_wait_for_it() -> None:
    got = told(exact=True, first=0, accuracies={0: 0.1, 1: 0.5, 2: 0.85, 3: 0.9})
    assert got == [(0, Verdict.GO_ON, 0), (1, Verdict.GO_ON, 0), (2, Verdict.STOP, 0)]  # and none after it


def test_in_async_only_what_changes_the_run_is_told() -> None:
    assert told(exact=False, first=0, accuracies={0: 0.1, 1: 0.5, 2: 0.85}) == [(2, Verdict.STOP, 0)]
    got = told(exact=False, first=0, accuracies={0: 0.1, 1: 0.75, 2: 0.85}, switch_margin=0.1)
    assert got == [(1, Verdict.SWITCH, 0)]


@pytest.mark.parametrize("old", [6, 7])
def test_after_a_switch_evaluations_of_before_stop_nothing(old: int) -> None:
    """Weight servers have gone beyond these weights, and would stop at different epochs."""
    assert told(exact=True, first=8, accuracies={old: 0.9}) == []
    assert told(exact=True, first=8, accuracies={old: 0.9, 8: 0.9}) == [(8, Verdict.STOP, 8)]


def test_close_to_the_target_an_exact_phase_goes_on() -> None:
    got = told(exact=True, first=8, accuracies={8: 0.75}, switch_margin=0.1)
    assert got == [(8, Verdict.GO_ON, 8)]


def test_patience_counts_epochs_since_the_best() -> None:
    got = told(
        exact=True,
        first=0,
        accuracies={0: 0.5, 1: 0.4, 2: 0.45},
        target_accuracy=0.0,
        patience=2,
        mode="pipe",
    )
    assert [verdict for _, verdict, _ in got] == [Verdict.GO_ON, Verdict.GO_ON, Verdict.STOP]
