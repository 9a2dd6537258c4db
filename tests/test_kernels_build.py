"""What the binary says about itself is what it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cython_kernels as ck
from cython_kernels import (
    _activation,
    _aggregate,
    _attention,
    _attention_v2,
    _dropout_masks,
    _loss,
    _max_pull,
    _rows,
    _transpose,
)


def test_build_info():
    info = ck.build_info()
    assert info.keys() == {"bounds_check", "openmp"}
    assert all(isinstance(value, bool) for value in info.values())


def test_sources_without_compiled_modules_say_what_to_do(tmp_path):
    """In a clone that is not built, they hide an installed package."""
    folder = tmp_path / "cython_kernels"
    folder.mkdir()
    for path in Path(ck.__file__).parent.glob("*.py"):
        (folder / path.name).write_bytes(path.read_bytes())
    command = [sys.executable, "-S", "-c", "import cython_kernels.layout"]
    paths = os.pathsep.join([str(tmp_path), str(Path(np.__file__).parents[1])])
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: the compiled modules of cython_kernels are missing in {tmp_path}: ")
    assert "pip install -e ." in last and "ModuleNotFoundError" not in result.stderr


FORKED = """
import os
import numpy as np
import cython_kernels as ck

x, indptr = np.random.default_rng(0).standard_normal((4096, 32)), np.arange(4097) * 8
indices = np.random.default_rng(1).integers(0, 4096, indptr[-1]).astype(np.int32)
before = ck.gather(indptr, indices, None, x, num_threads=2)
children = [os.fork()]
after = ck.gather(indptr, indices, None, x, num_threads=2)
if children[0] == 0:
    children = [os.fork()]  # and a child of the child
    after = ck.gather(indptr, indices, None, x, num_threads=3)
statuses = [os.waitpid(child, 0)[1] for child in children if child]
os._exit(statuses not in ([], [0]) or not np.array_equal(before, after))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_kernels_work_in_a_forked_process():
    """Threads of OpenMP are not there in the child, where GNU's runtime would wait for them for ever."""
    with subprocess.Popen([sys.executable, "-c", FORKED], start_new_session=True) as process:
        try:
            assert process.wait(timeout=60) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail("a kernel does not come back in a forked process")


DOCUMENTED = """
import numpy as np
import cython_kernels as ck

x, i = np.ones((3, 20), np.float32), np.arange(2, dtype=np.int32)
indptr, half, bits = np.arange(3), ck.to_bfloat16(x), np.empty((2, 20), np.uint16)
ck.from_tiles(ck.to_tiles(half), np.empty((3, 20), np.uint16))
ck.from_bfloat16(ck.from_tiles(ck.to_tiles(np.zeros((3, 4), np.uint16))))
ck.pack_rows(x, i, out=bits)
ck.unpack_rows(bits, i, x).sum()
ck.from_bfloat16(ck.pack_rows(half, i))
np.allclose(ck.gather(indptr, i, None, half), ck.gather(indptr, i, None, ck.to_tiles(x)), atol=0.1)
ck.dropout(x, np.arange(3), 0.5, seed=1, epoch=1, layer=1, out=ck.to_tiles(x)).columns
ck.attention_saved(3, 2, 20, "float32")
ck.choose_layout(indptr, i, x.shape, x.dtype)
"""


def test_type_hints_accept_what_is_documented(tmp_path):
    pytest.importorskip("mypy")
    script = tmp_path / "documented.py"
    script.write_text(DOCUMENTED)
    command = [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", str(script)]
    run = subprocess.run(
        [*command, f"--cache-dir={tmp_path / 'cache'}"],
        cwd=Path(__file__).parents[1],  # the sources' hints; beside installed packages mypy finds other names
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    exec(compile(DOCUMENTED, str(script), "exec"), {})


@pytest.mark.skipif(not ck.build_info()["bounds_check"], reason="not built with DORYLUS_BOUNDS_CHECK=1")
@pytest.mark.parametrize("bad", [-1, 2])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_bounds_checked_build_checks_behind_the_doors(bad, threads):
    none, x, out = np.empty(0), np.ones((2, 3)), np.zeros((2, 3))
    indptr, index = np.array([0, 1, 2]), np.array([0, bad], np.int32)
    scratch = np.empty((0, 0))
    with pytest.raises(IndexError):
        _aggregate.gather(
            indptr, index, none, x[None], out[None], 3, none, none, 0.0, False, False, False, 0, 2, scratch,
            0, threads,
        )  # fmt: skip
    with pytest.raises(IndexError):
        _aggregate.gather_max(
            indptr, index, x[None], out, np.empty((0, 0), np.int32), 0, 2, scratch, 0, threads
        )
    with pytest.raises(IndexError):
        _aggregate.gather_max_adjoint(4 * index[:, None].repeat(3, 1) + 4, x, out, False, 0, 2, threads)
    with pytest.raises(IndexError):
        _aggregate.gather_adjoint(
            indptr, index, none, x, out, none, none, 0.0, False, False, 0, 2, 0, threads
        )
    with pytest.raises(IndexError):
        _aggregate.gather_transposed(
            indptr, indptr, index, none, x, out, none, none, 0.0, False, False, False, 0, 2, scratch,
            0, threads,
        )  # fmt: skip
    with pytest.raises(IndexError):
        _max_pull.gather_max_pull(indptr, index, np.ones((2, 6)), np.arange(2), out, 0, 2, 0, threads)
    with pytest.raises(IndexError):
        named = 4 * index[:, None].repeat(3, 1) + 4
        packed = np.zeros((2, 6))
        _max_pull.pack_max(np.abs(named), x, np.arange(2), packed, packed.view(np.int64), 0, 2, threads)
    with pytest.raises(IndexError):
        _rows.pack_rows(x[None], index, out, 0, threads)
    with pytest.raises(IndexError):
        _rows.unpack_rows(x, index, out[None], 0, threads)
    with pytest.raises(IndexError):
        _rows.scatter_add_rows(x, index, out, 0, threads)
    with pytest.raises(IndexError):
        _activation.bias_relu_dropout(
            x, none, np.zeros(1, np.int64), none, out[None], True, 1, 1, 5, 1.0, False, 0, threads
        )
    with pytest.raises(IndexError):
        _activation.bias_elu_dropout(x, none, np.zeros(1, np.int64), out, 1, 1, 5, 1.0, 0, threads)
    with pytest.raises(IndexError):
        _activation.elu_dropout_backward(x, x, np.zeros(1, np.int64), out, 1, 1, 5, 1.0, 1.0, 0, threads)
    with pytest.raises(IndexError):
        entries = np.array([0, 1, 4 * bad])
        _dropout_masks.dropout_csr(
            entries, index, np.ones(2), np.arange(2), np.ones(2), 1, 1, 5, 1.0, 0, threads
        )
    with pytest.raises(IndexError):
        _transpose.transpose_csr(
            indptr, index, np.zeros(3, np.int64), np.zeros(2, np.int32), np.zeros(2, np.int64),
            np.zeros((threads, 2), np.int64),
        )  # fmt: skip
    with pytest.raises(IndexError):
        _transpose.transpose_rows(
            indptr, index, none, none, 0, 2, np.zeros(3, np.int64), np.zeros(2, np.int32), none,
            np.zeros((threads, 2), np.int64),
        )  # fmt: skip
    with pytest.raises(IndexError):
        _transpose.permute(indptr, index.astype(np.int64), np.ones(2), none, np.empty(2), threads)
    ids, masks = np.empty(0, np.int64), (0, 0, 1.0, 0, 2, 0, threads)
    with pytest.raises(IndexError):
        _attention.forward(indptr, index, x, x, x, out, *[np.empty((0, 0))] * 4, 0.2, ids, ids, *masks)
    with pytest.raises(IndexError):
        _attention.backward(
            indptr, index, x, x, np.ones((2, 4, 3)), x, out, out.copy(), 0.2, ids, ids, *masks
        )
    with pytest.raises(IndexError):
        _attention.weights(indptr, index, x, x, out, 0.2, ids, ids, *masks)
    a, both = np.ones((1, 3)), (0.2, ids, ids, *masks)
    with pytest.raises(IndexError):
        _attention_v2.forward(indptr, index, x, x, a, out, *[np.empty((0, 0))] * 2, *both)
    with pytest.raises(IndexError):
        _attention_v2.targets(
            indptr, index, x, x, a, x.copy(), x, *np.ones((2, 2, 1)), out, a.copy(), np.ones((2, 3, 1)), *both
        )
    with pytest.raises(IndexError):
        _attention_v2.adjoint(indptr, index, x, x, a, np.ones((2, 3, 1)), x, out, *both)
    with pytest.raises(IndexError):
        rows = (np.ones(2, np.uint8), np.empty(0), np.empty(2), out, True, 1.0, threads)
        _loss.softmax_cross_entropy(x, 4 * index, *rows)
    with pytest.raises(IndexError):
        rows = (np.ones(1, np.uint8), np.empty(0), np.empty(2), out, True, 1.0, threads)
        _loss.sigmoid_cross_entropy(x, np.ones(x.shape, np.uint8), *rows)
