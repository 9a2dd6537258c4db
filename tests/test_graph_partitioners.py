"""Partitioners on what is known to break them: property checks, since no answer is unique."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from graphs import AWKWARD, awkward, cliques, edgeless, make, path, star, undirected_random
from realdata import real_graph

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.clean import clean
from dorylus_hpc.graph.partitioners import fill_empty, level, partition
from dorylus_hpc.graph.readers import read_npz

KINDS = ("metis", "hash", "range")


def check_owner(owner: np.ndarray, n: int, parts: int) -> np.ndarray:
    """Every vertex owned once, by a part that exists; no part empty. Returns the sizes."""
    assert owner.shape == (n,)
    assert owner.dtype == np.int32
    sizes = np.bincount(owner, minlength=parts)
    assert len(sizes) == parts
    assert sizes.min() >= 1
    return sizes


def cut(graph, owner: np.ndarray) -> int:
    return int(np.count_nonzero(owner[graph.edges.rows()] != owner[graph.indices]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_graphs_as_they_come(name, kind):
    """Directed, loops, duplicates, isolated: nothing is cleaned before."""
    graph = awkward(name)
    for parts in {1, min(2, graph.n), min(5, graph.n), max(1, graph.n - 1), graph.n}:
        check_owner(partition(graph, parts, kind), graph.n, parts)


@pytest.mark.parametrize(
    ("n", "parts"),
    [(297, 64), (35, 7), (10, 10), (10, 9), (20, 19), (20, 6), (100, 33), (100, 34), (8, 3), (1, 1)],
)
@pytest.mark.parametrize("density", [1, 2, 6])
def test_metis_with_few_vertices_a_part(n, parts, density):
    graph = undirected_random(n, density * n)
    sizes = check_owner(partition(graph, parts), n, parts)
    assert sizes.max() <= 1.1 * n / parts + 3


@pytest.mark.parametrize("parts", [2, 3, 7, 16, 30])
@pytest.mark.parametrize(
    "graph",
    [star(99), cliques(2, 20), cliques(30, 3), path(100), edgeless(60)],
    ids=lambda g: f"{g.name}{g.n}",
)
def test_metis_balances_stars_cliques_and_pieces(graph, parts):
    sizes = check_owner(partition(graph, parts), graph.n, parts)
    assert sizes.max() <= 1.1 * graph.n / parts + 3


def test_metis_finds_the_pieces():
    graph = cliques(4, 25)
    assert cut(graph, partition(graph, 4)) == 0
    assert cut(graph, partition(graph, 4, "hash")) > 0


def test_metis_prefers_to_cut_what_occurs_once():
    """Two triangles-with-duplicates joined by single arcs: repeated edges weigh more."""
    i = np.repeat([0, 1, 2, 3, 4, 5], 4)
    j = np.repeat([1, 2, 0, 4, 5, 3], 4)
    graph = make(6, np.append(i, [0, 1, 2]), np.append(j, [3, 4, 5]))
    assert cut(graph, partition(graph, 2)) == 3


def test_isolated_vertices_go_to_the_lightest_parts():
    inner = cliques(3, 5)
    graph = make(15 + 10, inner.edges.rows(), inner.indices)
    assert np.bincount(partition(graph, 5)).tolist() == [5, 5, 5, 5, 5]


def test_metis_survives_in_a_process_of_its_own():
    """Raw directed, looped, repeated arcs kill METIS when handed over as they are."""
    code = (
        "from graphs import directed_weighted, directed_star\n"
        "from dorylus_hpc.graph.partitioners import partition\n"
        "for graph in (directed_weighted(), directed_star(500)):\n"
        "    for parts in (1, 2, 9):\n"
        "        print(len(partition(graph, parts)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["25"] * 3 + ["501"] * 3)


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(path for path in sys.path if path)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_parts(kind):
    graph = undirected_random(200, 900)
    assert np.array_equal(partition(graph, 5, kind, 3), partition(graph, 5, kind, 3))


def splitmix64(state: int) -> int:
    """The published generator's output for a state, in whole numbers."""
    full = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & full
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & full
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & full
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_hash_is_fixed_and_follows_the_seed(seed):
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # published for seed 0
    expected = [splitmix64(v ^ splitmix64(seed)) % 4 for v in range(40)]
    assert partition(edgeless(40), 4, "hash", seed).tolist() == expected
    assert partition(edgeless(40), 4, "hash", seed + 7).tolist() != expected


def test_hash_spreads():
    sizes = np.bincount(partition(edgeless(4000), 4, "hash", 2))
    assert abs(sizes - 1000).max() < 120


def test_range_is_contiguous_and_even():
    owner = partition(edgeless(10), 4, "range")
    assert owner.tolist() == sorted(owner)
    assert sorted(np.bincount(owner)) == [2, 2, 3, 3]


def test_fill_empty_takes_from_the_largest():
    owner = fill_empty(np.array([2, 2, 2, 2, 4], np.int32), 5)
    assert sorted(np.bincount(owner, minlength=5)) == [1, 1, 1, 1, 1]
    untouched = np.array([0, 1], np.int32)
    assert fill_empty(untouched, 2) is untouched


@pytest.mark.parametrize("sizes", [[0, 0, 0], [5, 1, 3], [4, 4], [9], [0, 7, 7, 2]])
@pytest.mark.parametrize("extra", [0, 1, 2, 5, 13])
def test_level_is_what_one_at_a_time_gives(sizes, extra):
    expected = np.array(sizes)
    for _ in range(extra):
        expected[expected.argmin()] += 1
    result = np.array(sizes) + level(np.array(sizes), extra)
    assert sorted(result) == sorted(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_more_parts_than_vertices(kind):
    with pytest.raises(InputError, match=r"--parts 10: more parts than the graph's 9 vertices"):
        partition(edgeless(9), 10, kind)


@pytest.mark.parametrize(
    ("kind", "parts", "message"),
    [
        ("metis", 0, "--parts 0: at least one"),
        ("metis", -3, "--parts -3"),
        ("stream", 2, "not available in this version"),
        ("louvain", 2, "louvain: unknown; known: metis, hash, range, file:PATH"),
        ("file", 2, "needs a path"),
        ("file:", 2, "needs a path"),
        ("file:/nowhere/owners.txt", 2, "/nowhere/owners.txt: cannot read the owner file: No such file"),
    ],
)
def test_wrong_requests(kind, parts, message):
    with pytest.raises(InputError, match=message):
        partition(edgeless(9), parts, kind)


# --- owner files


def test_owner_files_may_leave_parts_empty(tmp_path):
    (tmp_path / "owners.txt").write_text("0\n3\n 3 \n0\n\n")
    np.save(tmp_path / "owners.npy", np.array([0, 3, 3, 0], np.uint8))
    for name in ("owners.txt", "owners.npy"):
        owner = partition(edgeless(4), 9, f"file:{tmp_path / name}")
        assert (owner.tolist(), owner.dtype) == ([0, 3, 3, 0], np.int32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0\n1\n0\n", "has 3 entries, expected one for each of the 4"),
        ("0\n1\n0\n1\n0\n", "has 5 entries"),
        ("", "has 0 entries"),
        ("0\n1\n2\n0\n", r"line 3: part 2 is not in 0\.\.1"),
        ("0\n-1\n1\n0\n", "line 2: part -1"),
        ("0\n1\n1.5\n0\n", "line 3: '1.5' is not a part number"),
        ("0\n\n1\n0\n1\n", "line 2: '' is not a part number"),
        ("0\n1 0\n1\n0\n", "line 2: '1 0'"),
        ("0\n99999999999999999999\n1\n0\n", "line 2: '99999999999999999999'"),
        (np.array([0, 1, 5, 0]), "position 2: part 5"),
        (np.array([0.0, 1.0, 1.0, 0.0]), "float64"),
        (np.zeros((2, 2), int), r"shape \(2, 2\)"),
        (np.zeros(3, int), "has 3 entries"),
        (np.array([0, 1, None, 0], object), "cannot be read"),
    ],
)
def test_wrong_owner_files(tmp_path, content, message):
    file = tmp_path / "owners"
    if isinstance(content, str):
        file.write_text(content)
    else:
        with file.open("wb") as out:
            np.save(out, content)
    with pytest.raises(InputError, match=message) as caught:
        partition(edgeless(4), 2, f"file:{file}")
    assert str(file) in str(caught.value)


# --- real graphs


def test_metis_on_a_real_graph_with_isolated_vertices():
    graph = clean(read_npz(real_graph("citeseer")))
    for parts in (2, 5, 64):
        owner = partition(graph, parts)
        sizes = check_owner(owner, graph.n, parts)
        assert sizes.max() <= 1.05 * graph.n / parts + 2
        assert cut(graph, owner) < 0.5 * cut(graph, partition(graph, parts, "hash"))
