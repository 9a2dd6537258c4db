"""The archive for AWS: what is in it, that it is the same every time, and that it is enough."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
import threading
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dorylus_hpc.errors import InputError
from dorylus_hpc.serverless import archive
from dorylus_hpc.serverless.certificates import make_credentials
from dorylus_hpc.serverless.claim import Claim
from dorylus_hpc.serverless.tensor_server import Block, TensorServer

LAMBDA_PKG = Path(archive.lambda_pkg.__path__[0])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return archive.build(tmp_path_factory.mktemp("built") / "a.zip", compresslevel=1)


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(built.path) as opened:
        opened.extractall(folder)
    return folder


@pytest.fixture
def wheel(tmp_path):
    """A wheel with a file of every kind that a wheel of NumPy has."""
    path = tmp_path / "numpy-9.8.7-cp313-cp313-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as opened:
        for name in (
            "numpy/__init__.py",
            "numpy/__init__.pyi",
            "numpy/_core/_multiarray_umath.cpython-313-x86_64-linux-gnu.so",
            "numpy/_core/_simd.cpython-313-x86_64-linux-gnu.so",
            "numpy/_core/include/numpy/arrayobject.h",
            "numpy/_core/lib/libnpymath.a",
            "numpy/_core/tests/test_umath.py",
            "numpy/f2py/f2py2e.py",
            "numpy/lib/format.py",
            "numpy/random/lib/libnpyrandom.a",
            "numpy/testing/__init__.py",
            "numpy.libs/libscipy_openblas64_.so",
            "numpy-9.8.7.dist-info/METADATA",
            "numpy-9.8.7.dist-info/RECORD",
            "numpy-9.8.7.dist-info/licenses/LICENSE.txt",
            "../escape.py",
        ):
            opened.writestr(name, name)
    return path


def names_in(path):
    with zipfile.ZipFile(path) as opened:
        return opened.namelist()


def own_names():
    return sorted(f"lambda_pkg/{path.relative_to(LAMBDA_PKG)}" for path in LAMBDA_PKG.rglob("*.py"))


def alone(folder, program):
    """What a Python prints that has its standard library and this folder, and nothing else."""
    start = f"import sys; sys.path.insert(0, {str(folder)!r}); "
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", start + program],
        capture_output=True, text=True, cwd="/", env={"OPENBLAS_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_builds_are_the_same_bits(built, tmp_path):
    again = archive.build(tmp_path / "b.zip", compresslevel=1)
    assert again.path.read_bytes() == built.path.read_bytes()
    assert again.sha256 == built.sha256


def test_names_dates_and_modes_are_fixed(built):
    with zipfile.ZipFile(built.path) as opened:
        entries = opened.infolist()
    assert [entry.filename for entry in entries] == sorted({entry.filename for entry in entries})
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}
    modes = {entry.filename: stat.S_IMODE(entry.external_attr >> 16) for entry in entries}
    assert modes["lambda_pkg/__init__.py"] == 0o644
    assert {mode for name, mode in modes.items() if ".so" in name} == {0o755}


def test_sizes_are_told_and_fit_aws(built):
    with zipfile.ZipFile(built.path) as opened:
        assert built.unzipped == sum(entry.file_size for entry in opened.infolist())
    assert built.zipped == built.path.stat().st_size < archive.MAX_ZIPPED
    assert built.unzipped < 60e6
    assert built.numpy == metadata.version("numpy")


def test_it_holds_our_sources_a_slim_numpy_and_its_licence(built):
    names = names_in(built.path)
    assert [name for name in names if name.startswith("lambda_pkg/")] == own_names()
    assert {name.split("/")[0].split("-")[0] for name in names} <= {"lambda_pkg", "numpy", "numpy.libs"}
    assert "numpy/__init__.py" in names
    assert any(name.endswith("LICENSE.txt") for name in names)
    parts = {part for name in names if name.startswith("numpy/") for part in name.split("/")}
    assert not parts & {"tests", "testing", "f2py", "distutils", "include", "__pycache__"}
    assert not [name for name in names if name.endswith("/RECORD")]  # it would not be true
    assert not [name for name in names if name.endswith((".pyi", ".h", ".a", ".pyc"))]


def test_unpacked_alone_it_computes(unpacked):
    program = """
import json, numpy as np, numpy.linalg, numpy.random, lambda_pkg.dense
a = np.arange(6, dtype=np.float32).reshape(2, 3)
print(json.dumps([(a @ a.T).tolist(), np.__file__, lambda_pkg.dense.__file__]))
"""
    product, *files = alone(unpacked, program)
    assert product == [[5.0, 14.0], [14.0, 50.0]]
    assert files == [str(unpacked / "numpy/__init__.py"), str(unpacked / "lambda_pkg/dense.py")]


def test_unpacked_alone_the_handler_answers(unpacked):
    answer = alone(
        unpacked,
        "import json, lambda_pkg.handler as h; print(json.dumps(h.handler({'hello': True}, None)))",
    )
    assert answer["protocol"] == archive.lambda_pkg.VERSION
    assert answer["numpy"] == metadata.version("numpy")


def test_unpacked_alone_the_handler_serves_a_task(unpacked):
    """A worker that has the archive and nothing else: TLS, inputs, products, results."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(50, 8)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)
    y, accepted = np.zeros((50, 3), np.float32), threading.Event()
    run = make_credentials("archive")
    with TensorServer(context=run.server_context()) as server:
        token = server.offer([Block(x, True), Block(w, False)], [y], 20, Claim(accepted.set))
        event = {
            "protocol": archive.lambda_pkg.VERSION,
            "run": "archive",
            "server": {"host": server.address[0], "port": server.address[1]},
            "tls": run.descriptor(),
            "token": token,
            "ops": [["apply_vertex", {}, ["x", "w"], ["y"]]],
            "inputs": [
                {"name": "x", "dtype": "<f4", "shape": [50, 8], "rows": True, "key": None},
                {"name": "w", "dtype": "<f4", "shape": [8, 3], "rows": False, "key": "w@1"},
            ],
            "outputs": [{"name": "y", "dtype": "<f4", "shape": [50, 3], "rows": True}],
            "chunk": 20,
            "seconds": 30.0,
        }
        program = f"import json, lambda_pkg.handler as h; print(json.dumps(h.handler({event!r}, None)))"
        answer = alone(unpacked, program)
    assert answer["accepted"] and answer["cold"] and answer["bytes_in"] >= x.nbytes + w.nbytes
    assert accepted.is_set()
    np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-6)


def test_the_linked_folder_is_the_unpacked_archive(built, tmp_path):
    digest = archive.link_installed(tmp_path / "linked")
    files = [
        path.relative_to(tmp_path / "linked") for path in (tmp_path / "linked").rglob("*") if path.is_file()
    ]
    sources = sorted(path.as_posix() for path in files if "__pycache__" not in path.parts)
    assert sources == names_in(built.path)
    assert digest == archive.link_installed(tmp_path / "again")
    with zipfile.ZipFile(built.path) as opened:
        for name in ("lambda_pkg/dense.py", "numpy/version.py"):
            assert (tmp_path / "linked" / name).read_bytes() == opened.read(name)


def test_files_are_copied_where_links_are_refused(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError("no links here")

    (tmp_path / "a").write_text("text")
    monkeypatch.setattr(archive.os, "link", refuse)
    archive.link(tmp_path / "a", tmp_path / "deep" / "b")
    assert (tmp_path / "deep" / "b").read_text() == "text"


def test_a_wheel_is_slimmed_too(wheel, tmp_path):
    info = archive.build(tmp_path / "a.zip", source=wheel)
    assert info.numpy == "9.8.7"
    assert [name for name in names_in(info.path) if not name.startswith("lambda_pkg/")] == [
        "numpy-9.8.7.dist-info/METADATA",
        "numpy-9.8.7.dist-info/licenses/LICENSE.txt",
        "numpy.libs/libscipy_openblas64_.so",
        "numpy/__init__.py",
        "numpy/_core/_multiarray_umath.cpython-313-x86_64-linux-gnu.so",
        "numpy/lib/format.py",
    ]


def test_what_is_no_wheel_of_numpy_is_refused(tmp_path):
    (tmp_path / "text.whl").write_text("text")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as opened:
        opened.writestr("other/__init__.py", "")
    with pytest.raises(InputError, match=r"text\.whl cannot be read as a wheel"):
        archive.build(tmp_path / "a.zip", source=tmp_path / "text.whl")
    with pytest.raises(InputError, match=r"other\.whl is not a wheel of numpy"):
        archive.build(tmp_path / "a.zip", source=tmp_path / "other.whl")
    with pytest.raises(InputError, match=r"missing\.whl cannot be read"):
        archive.build(tmp_path / "a.zip", source=tmp_path / "missing.whl")
    with pytest.raises(InputError, match="does not exist"):
        archive.build(tmp_path / "no" / "a.zip")
    assert not (tmp_path / "a.zip").exists()


@pytest.mark.parametrize(("limit", "words"), [("MAX_ZIPPED", "MB zipped"), ("MAX_UNZIPPED", "MB unzipped")])
def test_an_archive_too_large_for_aws_is_refused(wheel, tmp_path, monkeypatch, limit, words):
    monkeypatch.setattr(archive, limit, 100)
    with pytest.raises(InputError, match=words):
        archive.build(tmp_path / "a.zip", source=wheel)
    assert not (tmp_path / "a.zip").exists()


class Pip:
    """Stands for `pip download`: puts a wheel into the folder, or fails."""

    def __init__(self, wheel=None, errors=""):
        self.wheel, self.errors, self.command = wheel, errors, []

    def __call__(self, command, **rest):
        self.command = command
        if self.wheel is not None:
            machine = "aarch64" if "aarch64" in str(command) else "x86_64"
            name = f"numpy-9.8.7-cp313-cp313-manylinux_2_28_{machine}.whl"
            Path(command[command.index("--dest") + 1], name).write_bytes(self.wheel.read_bytes())
        return SimpleNamespace(returncode=0 if self.wheel else 1, stderr=self.errors, stdout="")


@pytest.mark.parametrize(("arch", "machine"), [("x86_64", "x86_64"), ("arm64", "aarch64")])
def test_command_line_builds_for_aws(wheel, tmp_path, monkeypatch, capsys, arch, machine):
    pip = Pip(wheel)
    monkeypatch.setattr(archive.subprocess, "run", pip)
    output = tmp_path / "out.zip"
    assert archive.main(["-o", str(output), "--arch", arch, "--python", "3.13", "--numpy", "9.8.7"]) == 0
    assert "numpy/__init__.py" in names_in(output)
    assert "MB zipped (AWS takes 50)" in (said := capsys.readouterr().out) and f"3.13 on {arch}" in said
    assert pip.command[-1] == "numpy==9.8.7"
    platforms = [one for one in pip.command if one.startswith("--platform")]
    assert platforms[0] == f"--platform=manylinux_2_34_{machine}"  # glibc of Amazon Linux 2023
    assert f"--platform=manylinux_2_28_{machine}" in platforms


def test_the_version_is_the_installed_one_by_default(tmp_path, monkeypatch):
    pip = Pip(errors="ERROR: nothing")
    monkeypatch.setattr(archive.subprocess, "run", pip)
    with pytest.raises(InputError):
        archive.download_wheel(tmp_path)
    assert pip.command[-1] == f"numpy=={metadata.version('numpy')}"


def test_an_old_runtime_takes_no_wheels_for_newer_systems(tmp_path, monkeypatch):
    pip = Pip(errors="ERROR: nothing")
    monkeypatch.setattr(archive.subprocess, "run", pip)
    with pytest.raises(InputError, match=r"glibc 2\.26"):
        archive.download_wheel(tmp_path, python="3.11")
    assert "--platform=manylinux_2_28_x86_64" not in pip.command


def test_command_line_errors_take_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(archive.subprocess, "run", Pip(errors="noise\nERROR: No matching distribution\n"))
    assert archive.main(["-o", str(tmp_path / "a.zip"), "--numpy", "0.0.1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("archive: error: numpy 0.0.1 for Python 3.13 on x86_64") and said.count("\n") == 1
    assert "No matching distribution" in said
    assert archive.main(["-o", str(tmp_path / "a.zip"), "--python", "2.7"]) == 2
    assert "--python 2.7: choose one of" in capsys.readouterr().err
    for output in ("", str(tmp_path), "/dev/null", str(tmp_path / "none" / "a.zip")):
        assert archive.main(["-o", output]) == 2
        assert re.match(r"archive: error: .*( is no file|does not exist).*\n$", capsys.readouterr().err)
    with pytest.raises(SystemExit, match="2"):
        archive.main(["--arch", "sparc"])
    assert capsys.readouterr().err.count("\n") == 1
