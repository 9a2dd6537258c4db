"""Failures that all ranks share, faults that end the job, and collections in the order of parts."""

from __future__ import annotations

from itertools import pairwise

import graphs
import numpy as np
import pytest
from distributed import prepare

from dorylus_hpc.api import fit
from dorylus_hpc.comm import reduce
from dorylus_hpc.comm.failure import AgreedError, guarded, run_program, together
from dorylus_hpc.comm.reduce import gather_by_part, gather_rows
from dorylus_hpc.comm.roles import Placement, assign_roles
from dorylus_hpc.comm.tags import Kind, tag
from dorylus_hpc.errors import InputError

# ---- failures ----


def failing(comm, ranks):
    if comm.rank in ranks:
        raise InputError(f"no good on rank {comm.rank}")
    return comm.rank * 10


def test_together_gives_each_rank_its_value(comm):
    assert together(comm, lambda: failing(comm, [])) == comm.rank * 10


def test_together_fails_alike(comm):
    """Any set of failing ranks: all raise what the lowest of them found."""
    for bits in range(1, 2**comm.size):
        ranks = [rank for rank in range(comm.size) if bits >> rank & 1]
        with pytest.raises(AgreedError) as caught:
            together(comm, lambda ranks=ranks: failing(comm, ranks))
        assert str(caught.value) == f"no good on rank {ranks[0]}"
    assert comm.allreduce(1) == comm.size  # nobody was left behind


def test_a_program_ends_in_order_on_wrong_input(comm, capfd):
    last = comm.size - 1

    def main():
        together(comm, lambda: failing(comm, [last]))

    assert run_program(comm, "train", main) == 2
    told = capfd.readouterr().err
    assert told == (f"train: error: no good on rank {last}\n" if comm.rank == 0 else "")
    assert run_program(comm, "train", lambda: None) == 0


class _Job:
    """A job of several ranks that notes how it was aborted."""

    status = None

    def Get_size(self):  # noqa: N802 (mpi4py's name)
        return 3

    def Get_rank(self):  # noqa: N802
        return 2

    def Abort(self, status):  # noqa: N802
        self.status = status


@pytest.mark.parametrize(
    "error, status, words",
    [(InputError("a wrong thing"), 2, "error: a wrong thing"), (KeyError("gone"), 1, "Traceback")],
)
def test_a_fault_aborts_the_job(capfd, error, status, words):
    job = _Job()
    with guarded(job):
        raise error
    told = capfd.readouterr().err
    assert job.status == status
    assert told.startswith("rank 2 of 3 failed:\n") and words in told


def test_an_agreed_failure_aborts_nothing():
    job = _Job()
    with pytest.raises(AgreedError), guarded(job):
        raise AgreedError("all know")
    assert job.status is None


def fails_on_all(comm, folder, run_dir, **options):
    """Return the message of a run that all ranks must refuse alike."""
    with pytest.raises(AgreedError) as caught:
        fit(folder, comm=comm, run_dir=run_dir, epochs=1, **options)
    messages = comm.allgather(str(caught.value))
    assert len(set(messages)) == 1
    return messages[0]


@pytest.mark.parametrize("where", [0, -1])
def test_a_damaged_part_is_refused_by_all(comm, shared_tmp_path, where):
    folder = shared_tmp_path / "graph"
    prepare(comm, graphs.directed_random(), folder, parts=comm.size)
    file = sorted(folder.glob("*.h5"))[where]
    if comm.rank == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    comm.Barrier()
    assert file.name in fails_on_all(comm, folder, shared_tmp_path / "run")


def test_settings_that_do_not_fit_the_data(comm, shared_tmp_path):
    folder, run_dir = shared_tmp_path / "graph", shared_tmp_path / "run"
    prepare(comm, graphs.sparse_features(), folder, parts=comm.size)
    assert "--feature-norm standard" in fails_on_all(comm, folder, run_dir, feature_norm="standard")
    assert "--lr" in fails_on_all(comm, folder, run_dir, lr=-1)
    assert "no such" in fails_on_all(comm, shared_tmp_path / "nowhere", run_dir)


@pytest.mark.ranks(2)
def test_wrong_numbers_of_ranks(comm, shared_tmp_path):
    folder, run_dir, size = shared_tmp_path / "graph", shared_tmp_path / "run", comm.size
    prepare(comm, graphs.directed_random(), folder, parts=size - 1)
    assert f"mpirun -n {size - 1} " in fails_on_all(comm, folder, run_dir)
    assert "--servers" in fails_on_all(comm, folder, run_dir, servers=size)


# ---- order ----


@pytest.mark.parametrize("more", [0, 1, 4])
def test_gather_by_part(comm, more):
    placement = Placement(comm.size + more, comm.size)
    table = np.random.default_rng(1).standard_normal((placement.n_parts, 4))
    hosted = placement.hosted(comm.rank)
    got = gather_by_part(comm, placement, table[hosted.start : hosted.stop])
    if comm.rank:
        assert got is None
    else:
        np.testing.assert_array_equal(got, table)


@pytest.mark.parametrize("chunk", [5, 1 << 28])
def test_gather_rows(comm, monkeypatch, chunk):
    monkeypatch.setattr(reduce, "_CHUNK", chunk)
    placement = Placement(2 * comm.size + 1, comm.size)
    counts = [(3 * part) % 7 for part in range(placement.n_parts)]  # none in part 0
    bounds = np.concatenate([[0], np.cumsum(counts)])
    table = np.random.default_rng(2).standard_normal((bounds[-1], 3)).astype(np.float32)
    rows = [table[bounds[part] : bounds[part + 1]] for part in placement.hosted(comm.rank)]
    got = gather_rows(comm, placement, rows, counts)
    if comm.rank:
        assert got is None
    else:
        np.testing.assert_array_equal(got, table)


def test_placement_is_contiguous_and_even():
    for n_servers in range(1, 7):
        for n_parts in range(n_servers, 20):
            placement = Placement(n_parts, n_servers)
            ranges = [placement.hosted(server) for server in range(n_servers)]
            assert [part for hosted in ranges for part in hosted] == list(range(n_parts))
            assert all(a.stop == b.start for a, b in pairwise(ranges))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
            assert all(placement.host(part) == s for s, hosted in enumerate(ranges) for part in hosted)


def test_roles(comm):
    for servers in range(comm.size):
        roles = assign_roles(comm, servers)
        assert (roles.n_graph, roles.n_parameter) == (comm.size - servers, servers)
        assert roles.is_graph_server == (comm.rank < roles.n_graph)
        assert roles.owns_weights == (servers == 0 or not roles.is_graph_server)
    if comm.size > 1:
        with pytest.raises(InputError, match=f"-n {comm.size + 1} "):
            assign_roles(comm, comm.size)
    else:
        assert assign_roles(comm, 2).n_parameter == 0  # one rank does everything


def test_tags():
    stamps = [tag(kind, epoch=e, layer=la) for kind in Kind for e in range(32) for la in range(64)]
    assert len(set(stamps)) == len(stamps)
    assert 0 <= min(stamps) and max(stamps) <= 32767
