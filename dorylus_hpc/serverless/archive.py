"""The archive that is uploaded to AWS Lambda: ``lambda_pkg``, a slim NumPy, and nothing else.

NumPy comes from one of two places. The installed one is what the local service runs: the server's own
cores and its workers then compute with the same code, and no network is needed. A wheel from the package
index is what goes to AWS, whose Python and processor may be others than here.

The same files always give the same archive, bit for bit: names sorted, dates and modes fixed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import NoReturn

import lambda_pkg
from dorylus_hpc.errors import InputError
from dorylus_hpc.files import atomic_path

HANDLER = "lambda_pkg.handler.handler"
ARCHITECTURES = ("x86_64", "arm64")
DEFAULT_PYTHON = "3.13"
# What zipfile raises at files that are none, broken or encrypted.
UNREADABLE = (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
MAX_ZIPPED, MAX_UNZIPPED = 50_000_000, 250_000_000  # bytes; AWS means MiB perhaps, this is on the safe side

# glibc of the system under Lambda's runtimes: Amazon Linux 2023 from Python 3.12 on, Amazon Linux 2 before.
_GLIBC = {"3.11": 26, "3.12": 34, "3.13": 34, "3.14": 34}
_MACHINE = {"x86_64": "x86_64", "arm64": "aarch64"}

# What `import numpy` and the dense maths do without: tests, compilers, headers, types.
_LEFT_OUT_FOLDERS = {
    "__pycache__", "_examples", "_pyinstaller", "distutils", "doc", "f2py", "include", "testing", "tests",
    "typing",
}  # fmt: skip
_LEFT_OUT_SUFFIXES = {".a", ".c", ".h", ".pxd", ".pyi", ".pyx"}
_LEFT_OUT_MODULES = {
    "_multiarray_tests", "_operand_flag_tests", "_rational_tests", "_simd", "_struct_ufunc_tests",
    "_umath_tests", "conftest",
}  # fmt: skip
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class ArchiveInfo:
    """What was built.

    Attributes
    ----------
    path
        The archive.
    zipped, unzipped
        Bytes.
    numpy
        Version of NumPy in it.
    sha256
        Of the archive, in base64, as AWS gives it.
    """

    path: Path
    zipped: int
    unzipped: int
    numpy: str
    sha256: str


@dataclass(frozen=True)
class _Entry:
    name: str
    read: Callable[[], bytes]


def build(
    target: str | os.PathLike[str], *, source: str | os.PathLike[str] = "installed", compresslevel: int = 6
) -> ArchiveInfo:
    """Write the archive.

    Parameters
    ----------
    target
        The file to make; it appears whole or not at all.
    source
        ``"installed"``: the NumPy of this environment. Otherwise a NumPy wheel.
    compresslevel
        Of zlib, 0 to 9.

    Returns
    -------
    ArchiveInfo

    Raises
    ------
    InputError
        If the source is no NumPy wheel, the target cannot be written, or the archive is larger than AWS
        takes.
    """
    target = Path(target)
    _check_target(target)
    with _numpy_entries(source) as (version, numpy_entries):
        unzipped = 0
        with atomic_path(target) as temporary:
            with zipfile.ZipFile(
                temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=compresslevel
            ) as archive:
                for entry in sorted([*_own_entries(), *numpy_entries], key=lambda entry: entry.name):
                    content = entry.read()
                    unzipped += len(content)
                    archive.writestr(_zip_info(entry.name), content, compresslevel=compresslevel)
            content = temporary.read_bytes()
            _check_size("zipped", len(content), MAX_ZIPPED)
            _check_size("unzipped", unzipped, MAX_UNZIPPED)
    digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
    return ArchiveInfo(target, len(content), unzipped, version, digest)


def link_installed(folder: str | os.PathLike[str]) -> str:
    """Make the folder that unpacking the archive of the installed NumPy would give, in a blink.

    Files are hard links where the file system allows, else copies. NumPy's compiled modules
    (``__pycache__``) come along, so that the first worker need not compile them.

    Parameters
    ----------
    folder
        The folder to make; it must not exist.

    Returns
    -------
    str
        SHA-256 of names and contents of `lambda_pkg`, and of NumPy's version, in base64: it stands for
        the hash of the archive, which is not made.
    """
    folder = Path(folder)
    version, files = _installed_numpy(compiled=True)
    digest = hashlib.sha256(f"numpy {version}\n".encode())
    for name, path in sorted([*_own_files(), *files]):
        link(path, folder / name)
        if name.startswith("lambda_pkg/"):
            digest.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return base64.b64encode(digest.digest()).decode()


def link(source: Path, target: Path) -> None:
    """Make `target` a hard link to the file `source`, or a copy; folders above it are made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or somebody else's file
        shutil.copy2(source, target)


def download_wheel(
    folder: str | os.PathLike[str],
    version: str | None = None,
    *,
    arch: str = "x86_64",
    python: str = DEFAULT_PYTHON,
) -> Path:
    """Fetch NumPy's wheel for Lambda with pip.

    Parameters
    ----------
    folder
        Where to put it.
    version
        NumPy's version; by default that of this environment.
    arch
        Of the function: ``"x86_64"`` or ``"arm64"``.
    python
        Python of the function's runtime, such as ``"3.13"``.

    Returns
    -------
    pathlib.Path
        The wheel.

    Raises
    ------
    InputError
        If there is no such wheel, or pip cannot fetch it.
    """
    version = metadata.version("numpy") if version is None else version
    if arch not in _MACHINE:
        raise InputError(f"--arch {arch}: choose x86_64 or arm64")
    if python not in _GLIBC:
        raise InputError(f"--python {python}: choose one of {', '.join(_GLIBC)}")
    machine, newest = _MACHINE[arch], _GLIBC[python]
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, 16, -1)] + [
        f"manylinux2014_{machine}"
    ]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--only-binary=:all:", "--no-deps", "--python-version", python]
    command += ["--implementation", "cp", *(f"--platform={tag}" for tag in tags)]
    command += ["--dest", str(folder), f"numpy=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(Path(folder).glob(f"numpy-{version}-*{machine}*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = next((line for line in reversed(lines) if "ERROR" in line), (lines or ["no output"])[-1])
        raise InputError(
            f"numpy {version} for Python {python} on {arch} (glibc 2.{newest}) could not be fetched: {why}; "
            "try another --numpy or --python"
        )
    return wheels[-1]


def _own_files() -> Iterator[tuple[str, Path]]:
    for root in lambda_pkg.__path__:
        for path in Path(root).rglob("*.py"):
            yield f"lambda_pkg/{path.relative_to(root).as_posix()}", path


def _own_entries() -> list[_Entry]:
    return [_Entry(name, path.read_bytes) for name, path in _own_files()]


def _wanted(name: str) -> bool:
    """Whether a file of NumPy's goes into the archive."""
    path = PurePosixPath(name)
    top = path.parts[0]
    if top.endswith(".dist-info"):
        return path.name == "METADATA" or "licenses" in path.parts or path.name.startswith("LICENSE")
    if top not in ("numpy", "numpy.libs") or ".." in path.parts:
        return False
    return not (
        _LEFT_OUT_FOLDERS & set(path.parts[:-1])
        or path.parts[1:-1] in (("_core", "lib"), ("_core", "lib", "pkgconfig"), ("random", "lib"))
        or path.suffix in _LEFT_OUT_SUFFIXES
        or path.name.split(".")[0] in _LEFT_OUT_MODULES
    )


def _installed_numpy(*, compiled: bool = False) -> tuple[str, list[tuple[str, Path]]]:
    """Version and files of the installed NumPy; with their ``__pycache__`` files if `compiled`."""
    distribution = metadata.distribution("numpy")
    files = []
    for recorded in distribution.files or ():
        name, path = recorded.as_posix(), Path(str(recorded.locate()))
        source = name.replace("__pycache__/", "")
        tag = f".{sys.implementation.cache_tag}."
        is_compiled = compiled and name.endswith(f"{tag}pyc")
        if is_compiled and _wanted(source.replace(f"{tag}pyc", ".py")) or _wanted(name):
            if path.is_file():
                files.append((name, path))
    if not any(name == "numpy/__init__.py" for name, _ in files):
        raise InputError(
            f"numpy {distribution.version} in {distribution.locate_file('')} does not say which files it "
            "has (no RECORD); install it with pip"
        )
    return distribution.version, files


@contextmanager
def _numpy_entries(source: str | os.PathLike[str]) -> Iterator[tuple[str, list[_Entry]]]:
    if source == "installed":
        version, files = _installed_numpy()
        yield version, [_Entry(name, path.read_bytes) for name, path in files]
        return
    wheel = Path(source)
    try:
        with zipfile.ZipFile(wheel) as opened:
            names = [name for name in opened.namelist() if not name.endswith("/") and _wanted(name)]
            if "numpy/__init__.py" not in names:
                raise InputError(f"{wheel} is not a wheel of numpy")
            yield (
                wheel.name.split("-")[1],
                [_Entry(name, lambda name=name: opened.read(name)) for name in names],  # type: ignore[misc]
            )
    except UNREADABLE as error:
        raise InputError(f"{wheel} cannot be read as a wheel: {error}") from None


def _zip_info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _DATE)
    info.create_system = 3  # Unix: AWS wants the modes
    executable = ".so" in PurePosixPath(name).suffixes
    info.external_attr = (0o100755 if executable else 0o100644) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def _check_target(target: Path) -> None:
    if not target.parent.is_dir():
        raise InputError(f"{target}: the folder {target.parent} does not exist; make it first")
    if target.exists() and not target.is_file():  # a device would be replaced by the archive
        raise InputError(f"{target} is there and is no file; name another")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"{target}: the folder {target.parent.absolute()} cannot be written")


def _check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise InputError(
            f"the archive is {size / 1e6:.1f} MB {what}; AWS Lambda takes at most {limit / 1e6:.0f} MB"
        )


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"archive: error: {message} (see archive --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(prog="archive", description="Build the archive for AWS Lambda.", allow_abbrev=False)
    parser.add_argument("-o", "--output", required=True, metavar="FILE.zip", help="file to write")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="x86_64", help="default: %(default)s")
    parser.add_argument(
        "--python", default=DEFAULT_PYTHON, metavar="X.Y", help="of the runtime; default: %(default)s"
    )
    parser.add_argument("--numpy", metavar="VERSION", help="default: the version that is installed")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv
        Arguments; by default those of the process.

    Returns
    -------
    int
        Exit status: 0, or 2 for wrong input.
    """
    options = build_parser().parse_args(argv)
    try:
        _check_target(Path(options.output))  # before anything is fetched
        with tempfile.TemporaryDirectory() as folder:
            wheel = download_wheel(folder, options.numpy, arch=options.arch, python=options.python)
            info = build(options.output, source=wheel)
    except (InputError, OSError) as error:
        print(f"archive: error: {error}", file=sys.stderr)
        return 2
    print(
        f"{info.path}: numpy {info.numpy} for Python {options.python} on {options.arch}, "
        f"{info.zipped / 1e6:.1f} MB zipped (AWS takes {MAX_ZIPPED / 1e6:.0f}), "
        f"{info.unzipped / 1e6:.1f} MB unzipped (AWS takes {MAX_UNZIPPED / 1e6:.0f}); handler {HANDLER}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
