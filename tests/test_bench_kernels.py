"""The benchmark of the kernels: it runs, what it writes, and that it refuses wrong results."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import cases, checking, graphs, kernels, passes
from bench.cases import Candidate, Inputs
from bench.checking import WrongResult
from bench.peers import Peers

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--quick", "--scale", "0.0005", "--widths", "5", "20", "--threads", "1", "2", "--repeats", "1"]


@pytest.fixture(scope="module")
def peers():
    return Peers(["scipy"])


def start(*arguments):
    command = [sys.executable, "-m", "bench.kernels", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_quick_run(tmp_path):
    output = tmp_path / "folder" / "kernels.json"
    result = start(*TINY, "-o", output, "--peers", "scipy")
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(output.read_text())
    assert {"commit", "cpu", "caches", "instructions", "environment", "versions", "warnings"} <= set(written)
    assert set(written["limits_gb_per_second"]) == {"1", "2"}
    for limits in written["limits_gb_per_second"].values():
        assert min(limits["sequential"], limits["random_rows"], limits["cached_lines"]) > 0
    assert [graph["name"] for graph in written["graphs"]] == ["uniform", "rmat", "none"]
    measured = {row["kernel"] for row in written["results"]}
    assert measured >= set(cases.KERNELS) | set(passes.PASSES)
    for row in written["results"]:
        assert row["seconds"]["median"] >= row["seconds"]["min"] > 0
        assert (row["gflops"] is None) != (row["ns_per_value"] is None)
        assert row["gb_per_second"] > 0 and row["share_of_limit"] > 0 and row["rounds"] == 1
        assert (
            row["peer"]
            or row["kernel"] in ("dropout", "bias_relu_dropout", "gather_max")
            or row["kernel"] in ("bias_elu_dropout", "elu_dropout_backward")
            or (row["kernel"].startswith("attention") or row["times_fastest_peer"] > 0)
        )
    first = next(row for row in written["results"] if row["kernel"] == "gather_sum" and row["threads"] == 2)
    assert (first["candidate"], first["layout"]) == ("auto", "rows")
    assert "of limit" in result.stdout and "geometric mean" in result.stdout


def test_real_graph(tmp_path):
    n, rng = 30, np.random.default_rng(0)
    rows, columns = np.nonzero(rng.random((n, n)) < 0.2)
    np.savez(
        tmp_path / "mine.npz",
        indptr=np.searchsorted(rows, np.arange(n + 1)),
        indices=columns,
        x=rng.random((n, 3)),
        y=np.arange(n) % 2,
    )
    options = ["--data-dir", tmp_path, "--graphs", "mine", "--kernels", "gcn", "-o", tmp_path / "out.json"]
    result = start(*TINY, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["graphs"][0]["entries"] == len(rows)


@pytest.mark.parametrize("option", [["--graphs", "nowhere"], ["--kernels", "no"], ["--widths", "0"]])
def test_refused_options(option, capsys):
    with pytest.raises(SystemExit) as ended:
        kernels.parse(option)
    assert ended.value.code == 2


def test_what_cannot_be_written_is_refused_before_measuring(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "run", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    ok, plot = tmp_path / "new" / "out.json", tmp_path / "plot.png"

    def refused(*arguments):
        assert kernels.main([*TINY, *map(str, arguments)]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1, told
        return told

    assert "cannot write" in refused("-o", tmp_path / "file" / "out.json")
    assert "it is a folder" in refused("-o", tmp_path)
    assert "not among --kernels" in refused("-o", ok, "--plot", plot, "--kernels", "gcn")
    with monkeypatch.context() as without:
        for name in [*sys.modules]:
            if name.partition(".")[0] == "matplotlib":
                without.delitem(sys.modules, name)
        without.setitem(sys.modules, "matplotlib", None)
        assert "--plot needs matplotlib" in refused("-o", ok, "--plot", plot)
    assert not plot.exists() and not ok.exists()


def test_pictures_that_cannot_be_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = [*TINY, "-o", str(tmp_path / "out.json"), "--plot"]
    assert kernels.main([*options, str(tmp_path / "plot.xyz")]) == 2
    assert "known endings are" in capsys.readouterr().err
    assert kernels.refusal(kernels.parse([*options, str(tmp_path / "plot.png")])) is None


def test_help_tells_how_to_read_the_table(capsys):
    with pytest.raises(SystemExit):
        kernels.parse(["--help"])
    told = capsys.readouterr().out
    told = told[told.index("How to read the table") :]
    for word in (
        "scaling",
        '"none"',
        '"tiles"',
        '"Tiles"',
        '"auto"',
        "x peer",
        "of\n  limit",
        "geometric mean",
    ):
        assert word in told, word


def test_plot(tmp_path, peers):
    pytest.importorskip("matplotlib")
    case = cases.gather_sum(Inputs(graphs.awkward(), 21, peers))
    times = {(candidate.name, 1): [0.5, 0.25, 1.0] for candidate in case.candidates}
    kernels.plot(kernels.rows_of(case, times, {}), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_figures(peers):
    """Median, rates, and the ratio to the fastest peer; one of a single thread counts for all numbers."""
    graph = graphs.awkward()
    case = cases.gather_sum(Inputs(graph, 21, peers))
    times = {("auto", 1): [3.0, 1.0, 2.0], ("auto", 2): [1.0, 1.0, 1.0], ("scipy", 1): [4.0, 3.0, 5.0]}
    limits = {count: {"random_rows": 1e-3 * count} for count in (1, 2)}
    one, two, _ = kernels.rows_of(case, times, limits)
    assert (one["seconds"], one["rounds"]) == ({"median": 2.0, "min": 1.0}, 3)
    assert one["gflops"] == pytest.approx(2 * graph.nnz * 21 / 2.0 / 1e9)
    assert one["share_of_limit"] == pytest.approx(graph.nnz * 21 * 4 / 2.0 / 1e6)
    assert (one["fastest_peer"], one["times_fastest_peer"], two["times_fastest_peer"]) == ("scipy", 2.0, 4.0)
    assert (one["scaling"], two["scaling"]) == (1.0, 2.0)


# ---- wrong candidates ----


def spoiled(run, place):
    """The same candidate, one value being a little off."""

    def wrong(threads):
        result = run(threads).copy()
        result[place] *= 1.01
        return result

    return wrong


@pytest.mark.parametrize("kernel", [*cases.KERNELS, *passes.PASSES])
@pytest.mark.parametrize("large", [False, True])
def test_a_wrong_candidate_is_caught(kernel, large, peers):
    """On a large input the sampled rows are held to every value; of the others gathers to their sums."""
    graph = graphs.uniform("g", 1.0, vertices=3000, entries=30_000) if large else graphs.awkward()
    case = kernels.BUILDERS[kernel](Inputs(graph, 21, peers))
    candidate = case.candidates[0]
    kernels.check(case, candidate, 1)
    case.reset()
    filled = np.argwhere(candidate.run(1) != 0)
    place = tuple(filled[len(filled) // 2 if kernel in LINEAR else -1])
    with pytest.raises(WrongResult, match=f"auto: {kernel} on .*, width 21, 1 threads: .*wanted"):
        kernels.check(case, replace(candidate, run=spoiled(candidate.run, place)), 1)


LINEAR = {*cases.KERNELS, "scatter_add_rows", "csr_product"} - {"gather_max"}


def test_a_candidate_that_does_nothing_is_caught(peers):
    """It can't pass off what the one before it has left."""
    inputs = Inputs(graphs.awkward(), 21, peers)
    case = cases.gather_sum(inputs)
    kernels.check(case, case.candidates[0], 1)
    with pytest.raises(WrongResult):
        kernels.check(case, Candidate("idle", lambda threads: inputs.out, case.candidates[0].check), 1)


def test_a_wrong_shape_is_caught():
    with pytest.raises(WrongResult, match="shape"):
        checking.close(np.ones((2, 3)), np.ones((2, 4)), 1.0)


def test_dropout_of_another_generator():
    whole = np.ones((1000, 10))
    kept = np.where(np.random.default_rng(0).random(whole.shape) < 0.5, 2.0, 0.0)
    checking.dropped(whole, 0.5)(kept)
    for wrong in (kept * 1.01, np.full_like(kept, 2.0), np.zeros_like(kept)):
        with pytest.raises(WrongResult):
            checking.dropped(whole, 0.5)(wrong)


def test_exit_status_of_a_wrong_result(monkeypatch, capsys):
    def wrong(inputs):
        case = cases.gather_mean(inputs)
        first = case.candidates[0]
        case.candidates[0] = replace(first, run=spoiled(first.run, (5, 0)))
        return case

    monkeypatch.setitem(kernels.BUILDERS, "gather_mean", wrong)
    assert kernels.main([*TINY, "--kernels", "gather_mean", "--peers"]) == 1
    assert "WRONG: auto: gather_mean on awkward" in capsys.readouterr().err


# ---- graphs ----


@pytest.mark.parametrize("name", graphs.GENERATED)
def test_generated_graphs(name):
    graph = graphs.GENERATED[name](0.001)
    again = graphs.GENERATED[name](0.001)
    assert np.array_equal(graph.indices, again.indices)
    assert graph.indptr.dtype == np.int64 and graph.indices.dtype == np.int32
    assert graph.indptr[0] == 0 and graph.indptr[-1] == graph.nnz
    assert 0 <= graph.indices.min() and graph.indices.max() < graph.n
    rows = np.repeat(np.arange(graph.n), graph.degrees)
    keys = rows * graph.n + graph.indices
    assert np.array_equal(keys, np.sort(keys))
    indptr, indices, places = graph.transposed
    assert np.array_equal(rows[places], indices)
    assert np.array_equal(graph.indices[places], np.repeat(np.arange(graph.n), np.diff(indptr)))


PROGRAMS = {path.stem for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text()}


@pytest.mark.parametrize("name", sorted(PROGRAMS - {"attention"}))  # which only kernels starts
def test_every_bench_can_be_started(name):
    run = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
