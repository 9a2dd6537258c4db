"""All ranks end a phase with the same epoch, whatever came late."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dorylus_hpc.comm.mailbox import Letter, Letters
from dorylus_hpc.config import make_config
from dorylus_hpc.engine.graph_server import GraphServer
from dorylus_hpc.engine.recorder import Account
from dorylus_hpc.engine.weights import Service, Verdict, WeightServer, WeightShard
from dorylus_hpc.nn.optim import make_optimizer
from dorylus_hpc.nn.params import ParamSpec, plan_layout
from dorylus_hpc.report.trace import Tracer

PARTS = (0, 1)


def epochs_told(first: int, whole: int, rounds_done: int) -> int:
    """Let a graph server end a phase after its parts have done some epochs; return what it tells of it."""
    told: list[int] = []
    server: Any = object.__new__(GraphServer)
    schedule = SimpleNamespace(finished=True, rounds_done=rounds_done, max_lead=0, max_read_age=0)

    def run(until: object) -> None:
        if not told:
            for number in range(whole):
                for part in PARTS:
                    server.complete(part, number)
        else:
            server._ended.append((told[0], Verdict.STOP))

    server._runner = SimpleNamespace(
        training=SimpleNamespace(schedule=schedule),
        evaluation=None,
        loop=SimpleNamespace(run=run, do=lambda line, actions: None),
        begin=lambda *arguments, **options: [],
        parts=PARTS,
        add_gradients=lambda part: None,
        take_results=lambda *key: SimpleNamespace(loss=0.0, tally=None),
    )
    server._client = SimpleNamespace(end=told.append, push=lambda *numbers: None)
    server._mailbox = SimpleNamespace(send=lambda *letter, data: None, dtype=np.dtype(np.float32))
    server._config = make_config({"mode": "pipe"})
    server._server = server._registrar = server._lambda = server._tuning = None
    server._first, server._exact, server._epoch_began, server._whole = first, True, 0.0, 0
    server._ended, server._sums, server._left, server._account = [], {}, Counter(), Account()
    server._phase("pipe")
    return told[0]


@pytest.mark.parametrize("first", [0, 4])
def test_epochs_count_whose_gradients_were_sent(first: int) -> None:
    """A ghosts' unit that was denied its weights has not done the last round; all parts have."""
    assert epochs_told(first, whole=3, rounds_done=3) == first + 3
    assert epochs_told(first, whole=3, rounds_done=2) == first + 3
    assert epochs_told(first, whole=0, rounds_done=0) == first


def end_with(late: bool) -> list[tuple[int, ...]]:
    """Let two weight servers end a phase of two epochs; the second one's weights may come late to the first.

    Return what graph servers hear of it: epochs behind the last weights, of each weight server.
    """
    specs = (ParamSpec("W1", 1, (4, 3)), ParamSpec("W2", 2, (4, 3)))
    layout = plan_layout(specs, 2)
    service = Service(
        servers=(0, 1),
        clients=(0, 1),
        layout=layout,
        n_parts=2,
        n_intervals=2,
        epochs=10,
        readers=lambda version: (),
        judged=lambda version: False,
    )
    post: list[tuple[int, int, Letters, tuple[int, ...], np.ndarray]] = []
    servers = []
    for rank in (0, 1):

        def send(to: int, kind: Letters, *numbers: int, data: Any = None, rank: int = rank) -> None:
            post.append((rank, to, kind, numbers, np.empty(0) if data is None else data.copy()))

        shard = WeightShard(layout, rank, make_optimizer("sgd", lr=0.1), layout.initial(0, np.dtype(float)))
        mailbox: Any = SimpleNamespace(rank=rank, send=send)
        servers.append(WeightServer(mailbox, service, shard, Tracer(0.0, limit=0)))
        servers[-1].begin(exact=False, at_once=False)

    def deliver(kinds: tuple[Letters, ...], to: int) -> None:
        for letter in [one for one in post if one[2] in kinds and one[1] == to]:
            post.remove(letter)
            servers[to].handle(Letter(letter[0], letter[2], letter[3], letter[4]))

    for epoch in (1, 2):
        for part in PARTS:
            for rank in (0, 1):
                start, stop = layout.segments[rank]
                letter = Letter(part, Letters.PUSH, (epoch, part), np.ones(stop - start))
                servers[rank].handle(letter)
        if epoch == 1 or not late:
            deliver((Letters.PUBLISH,), 0)
        deliver((Letters.PUBLISH,), 1)
    for rank in (0, 1):
        for client in (0, 1):
            servers[rank].handle(Letter(client, Letters.DONE, (2, int(Verdict.STOP)), np.empty(0)))
    deliver((Letters.PUBLISH,), 0)
    return [numbers for _, _, kind, numbers, _ in post if kind is Letters.FINAL]


@pytest.mark.parametrize("late", [False, True])
def test_weight_servers_end_with_the_same_epoch(late: bool) -> None:
    assert sorted(end_with(late)) == [(2, Verdict.STOP)] * 2


def second_weight_server(specs: tuple[ParamSpec, ...]) -> tuple[WeightServer, list[int]]:
    """Return the second of two weight servers of one graph server; and how much each of them owns."""
    layout = plan_layout(specs, 2)
    service = Service(
        servers=(1, 2),
        clients=(0,),
        layout=layout,
        n_parts=1,
        n_intervals=1,
        epochs=10,
        readers=lambda version: (0,),
        judged=lambda version: True,
    )
    mailbox: Any = SimpleNamespace(rank=2, send=lambda to, kind, *numbers, data=None: None)
    shard = WeightShard(layout, 1, make_optimizer("sgd", lr=0.1), layout.initial(0, np.dtype(float)))
    sizes = [stop - start for start, stop in layout.segments]
    return WeightServer(mailbox, service, shard, Tracer(0.0, limit=0)), sizes


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("n_tensors", [1, 2])
def test_a_weight_server_that_nobody_waits_for_loses_nothing_of_the_next_phase(
    n_tensors: int, early: bool
) -> None:
    """It may sleep while the graph server, whose home is another one, goes on in the next phase.

    With one tensor it owns nothing, and hears of epochs by what the other publishes alone; that may even come
    before the graph server's word that the phase is over, which is of another sender.
    """
    specs = tuple(ParamSpec(f"W{k}", k, (4, 3)) for k in range(1, n_tensors + 1))
    server, (others, owned) = second_weight_server(specs)
    assert bool(owned) is (n_tensors == 2)
    other = np.ones(others)

    def hear(source: int, kind: Letters, *numbers: int, data: np.ndarray | None = None) -> None:
        server.handle(Letter(source, kind, (*numbers, 0, 0, 0), np.empty(0) if data is None else data))

    def push(epoch: int) -> None:
        if owned:
            hear(0, Letters.PUSH, epoch, 0, data=np.ones(owned))

    server.begin(exact=False, at_once=False)
    push(1)
    hear(1, Letters.PUBLISH, 1, 0, data=other)
    if early:
        hear(1, Letters.PUBLISH, 2, 1, data=2 * other)
    hear(0, Letters.DONE, 1, int(Verdict.SWITCH))
    assert server.finished
    assert (server.outcome, server.epochs) == (Verdict.SWITCH, 1)
    push(2)
    if not early:
        hear(1, Letters.PUBLISH, 2, 1, data=2 * other)
    hear(0, Letters.VERDICT, 1, int(Verdict.GO_ON), 1)
    hear(0, Letters.DONE, 2, int(Verdict.GO_ON))
    server.begin(exact=True, at_once=False)
    assert server.finished
    assert server.epochs == 2


@pytest.mark.parametrize("mode", ["pipe", "async"])
@pytest.mark.parametrize("weight_update", ["epoch", "interval"])
@pytest.mark.parametrize("evaluated", [False, True])
def test_the_last_weights_are_evaluated_as_they_are(mode: str, weight_update: str, evaluated: bool) -> None:
    """Gradients applied at once may have changed them since the epoch after which they were evaluated."""
    added: list[int] = []
    told: list[tuple[int, int]] = []
    runner: Any = SimpleNamespace(
        loop=SimpleNamespace(
            listen=lambda *arguments: None, run=lambda until: None, leave=lambda: None, seconds={}
        ),
        evaluation=SimpleNamespace(expects=True),
        begin=lambda *arguments, **options: [],
        training=SimpleNamespace(exchange=SimpleNamespace(sent_bytes=0)),
        leave=lambda: None,
        seconds={},
    )
    runner.loop.do = lambda line, actions: None
    layout = SimpleNamespace(views=lambda flat: {"W": flat}, segments=())
    service: Any = SimpleNamespace(layout=layout, servers=())
    config = make_config(
        {"mode": mode, "epochs": 9} | ({"weight_update": weight_update} if mode == "async" else {})
    )
    server = GraphServer(
        runner,
        SimpleNamespace(),
        service,
        None,
        config,
        evaluates=True,
        registrar=None,  # type: ignore[arg-type]
    )
    server._client = SimpleNamespace()  # type: ignore[assignment]

    def phase(mode: str) -> tuple[int, Verdict]:
        server._at_once = mode == "async" and weight_update == "interval"
        server._last_flat = np.zeros(1)
        if evaluated:
            server._evaluations.versions.append(4)
        server._evaluations.add = lambda version, weights: added.append(version)  # type: ignore[method-assign]
        return 4, Verdict.STOP

    server._phase = phase  # type: ignore[method-assign]
    server._registrar = SimpleNamespace(  # type: ignore[assignment]
        last=lambda epochs, flat, version: told.append((epochs, version)), close=lambda: None
    )
    server.run(Account())
    at_once = mode == "async" and weight_update == "interval"
    version = 10 if at_once else 4
    assert told == [(4, version)]
    assert added == ([version] if at_once or not evaluated else [])
