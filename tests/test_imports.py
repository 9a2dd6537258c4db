"""Who may import whom. Reads the sources, imports nothing, and covers files that appear later.

Imports go downwards: a unit (a package or module named below) imports from lower layers, from itself,
and from its neighbours, except where they are strangers. ::

    4  entry points            prepare train predict plan deploy model api, and what they share: cli sources
    3  engine
    2  nn | comm | serverless  strangers; but comm, which moves weights, knows how nn lays them out
    1  config errors files graph report
    0  cython_kernels | lambda_pkg
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cython_kernels", "lambda_pkg", "dorylus_hpc")
LAYERS = {
    "cython_kernels": 0,
    "lambda_pkg": 0,
    **{f"dorylus_hpc.{name}": 1 for name in ("config", "errors", "files", "graph", "report")},
    **{f"dorylus_hpc.{name}": 2 for name in ("nn", "comm", "serverless")},
    "dorylus_hpc.engine": 3,
    **{
        f"dorylus_hpc.{name}": 4
        for name in ("prepare", "train", "predict", "plan", "deploy", "model", "api", "cli", "sources")
    },
    "dorylus_hpc": 4,  # __init__.py: offers what api offers
}
STRANGERS = {0, 2}
ACQUAINTED = {("dorylus_hpc.comm", "dorylus_hpc.nn")}
MAY_IMPORT_MPI = {"dorylus_hpc.comm", "dorylus_hpc.api", "dorylus_hpc.train", "dorylus_hpc.predict"}
AWS = {"boto3", "botocore", "awslambdaric"}
STANDARD = set(sys.stdlib_module_names)

PYX_IMPORT = re.compile(
    r"^\s*(?:from\s+([\w.]+)\s+c?import\s+\(?([\w, ]+)|c?import\s+([\w.]+))", re.MULTILINE
)


def files() -> list[Path]:
    return sorted(
        path for package in PACKAGES for pattern in ("*.py", "*.pyi", "*.pyx", "*.pxd")
        for path in (ROOT / package).rglob(pattern)
    )  # fmt: skip


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """The name in the table that a module of ours belongs to."""
    top, _, rest = module.partition(".")
    return f"{top}.{rest.split('.')[0]}" if top == "dorylus_hpc" and rest else top


def absolute(package: list[str], level: int, name: str) -> str:
    """The absolute name of what `from <level dots><name> import` names inside a package."""
    return ".".join([*package[: len(package) - level + 1], *([name] if name else [])]) if level else name


def for_types_only(tree: ast.Module) -> set[ast.AST]:
    """The nodes below `if TYPE_CHECKING:`, which never run."""
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def is_mpi(name: str | None) -> bool:
    return name is not None and name.split(".")[0] == "mpi4py"


def imports(source: str, module: str, *, is_package: bool, is_cython: bool) -> set[str]:
    """Every module that a source names in an import, wherever it stands, in absolute form.

    Left out is only the type of a communicator: a name that never runs, and needs no MPI.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    found: list[tuple[int, str, list[str]]] = []
    if is_cython:
        for origin, names, plain in PYX_IMPORT.findall(source):
            level = len(origin) - len(origin.lstrip("."))
            found.append(
                (
                    level,
                    origin.lstrip(".") or plain,
                    [one.strip() for one in names.split(",")] if names else [],
                )
            )
    else:
        tree = ast.parse(source)
        typing_only = for_types_only(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [
                    (0, alias.name, [])
                    for alias in node.names
                    if node not in typing_only or not is_mpi(alias.name)
                ]
            elif isinstance(node, ast.ImportFrom) and not (node in typing_only and is_mpi(node.module)):
                found.append((node.level, node.module or "", [alias.name for alias in node.names]))
    result = set()
    for level, name, names in found:
        origin = absolute(package, level, name)
        # `from dorylus_hpc import errors` is an import of dorylus_hpc.errors.
        inner = {f"{origin}.{one}" for one in names} if origin == "dorylus_hpc" else set()
        known = {one for one in inner if one in LAYERS}
        result |= known | ({origin} if inner == set() or known != inner else set())
    return result


def broken_rules(module: str, names: set[str]) -> list[str]:
    """What is wrong with a module of ours importing these modules."""
    unit = unit_of(module)
    if unit not in LAYERS:
        return [f"{unit} is in no layer; give it one in tests/test_imports.py"]
    wrong = []
    for name in sorted(names):
        top, target = name.split(".")[0], unit_of(name)
        if top in PACKAGES and target not in LAYERS:
            wrong.append(f"{name} is in no layer")
        elif top in PACKAGES and target != unit:
            if LAYERS[target] > LAYERS[unit]:
                wrong.append(f"{name} is in a higher layer")
            elif LAYERS[target] == LAYERS[unit] in STRANGERS and (unit, target) not in ACQUAINTED:
                wrong.append(f"{name} is a stranger in the same layer")
        elif top == "mpi4py" and unit not in MAY_IMPORT_MPI:
            wrong.append("mpi4py belongs to comm and the entry points that run on ranks")
        elif unit == "lambda_pkg" and top not in STANDARD | {"numpy", "lambda_pkg"}:
            wrong.append(f"{name}: the archive has the standard library and NumPy only")
        elif unit == "cython_kernels" and top not in STANDARD | {"numpy", "cython_kernels", "cython", "libc"}:
            if not (module == "cython_kernels.reference" and top == "scipy"):
                wrong.append(f"{name}: kernels use NumPy only")
        elif top in AWS and unit not in {"dorylus_hpc.serverless", "dorylus_hpc.deploy"}:
            wrong.append(f"{name} belongs to serverless and deploy")
    return wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_there_are_sources_to_hold_the_rule_on(package):
    assert [path for path in files() if path.is_relative_to(ROOT / package)], (
        f"no sources below {ROOT / package}"
    )


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    module = module_of(path)
    names = imports(
        path.read_text(encoding="utf-8"),
        module,
        is_package=path.stem == "__init__",
        is_cython=path.suffix in (".pyx", ".pxd"),
    )
    assert broken_rules(module, names) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("cython_kernels.rows", "from dorylus_hpc.errors import InputError"),
        ("cython_kernels.rows", "import lambda_pkg.dense"),
        ("cython_kernels.rows", "import scipy"),
        ("lambda_pkg.dense", "import boto3"),
        ("lambda_pkg.dense", "import cython_kernels"),
        ("lambda_pkg.dense", "from scipy.linalg import blas"),
        ("dorylus_hpc.errors", "import dorylus_hpc"),
        ("dorylus_hpc.graph.data", "from ..nn import init"),
        ("dorylus_hpc.graph.data", "def f():\n    from dorylus_hpc import engine"),
        ("dorylus_hpc.graph.data", "import mpi4py"),
        ("dorylus_hpc.nn.gcn", "from dorylus_hpc.comm.halo import Halo"),
        ("dorylus_hpc.nn.gcn", "from dorylus_hpc import fit"),
        ("dorylus_hpc.comm.halo", "from ..engine import trainer"),
        ("dorylus_hpc.engine.trainer", "from mpi4py import MPI"),
        ("dorylus_hpc.engine.trainer", "import boto3"),
        ("dorylus_hpc.engine.trainer", "from dorylus_hpc.api import fit"),
        ("dorylus_hpc.prepare", "from mpi4py import MPI"),
        ("dorylus_hpc.graph.data", "from .. import nowhere"),
        ("dorylus_hpc.prepare", "import dorylus_hpc.nowhere"),
        ("dorylus_hpc.nowhere", "import os"),
    ],
)
def test_the_rule_refuses(module, line):
    assert broken_rules(module, imports(line, module, is_package=False, is_cython=False))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("cython_kernels.reference", "import scipy.sparse"),
        ("cython_kernels.rows", "from . import _rows, checks"),
        ("dorylus_hpc.graph.data", "from dorylus_hpc import errors"),
        ("dorylus_hpc.nn.gcn", "from lambda_pkg.dense import apply_vertex"),
        ("dorylus_hpc.comm.halo", "from mpi4py import MPI"),
        ("dorylus_hpc.comm.weights", "from dorylus_hpc.nn.params import FlatLayout"),
        ("dorylus_hpc.engine.loading", "if TYPE_CHECKING:\n    from mpi4py.MPI import Intracomm"),
        ("dorylus_hpc.train", "from . import config\nfrom .api import fit\nfrom mpi4py import MPI"),
        ("dorylus_hpc", "from .api import fit"),
    ],
)
def test_the_rule_allows(module, line):
    assert (
        broken_rules(module, imports(line, module, is_package=module == "dorylus_hpc", is_cython=False)) == []
    )


def test_cython_sources_are_read_too():
    source = "from libc.stdint cimport int32_t\nfrom ._types cimport real_t\n"
    source += "cimport numpy\nimport dorylus_hpc.graph\n"
    names = imports(source, "cython_kernels._rows", is_package=False, is_cython=True)
    assert names == {"libc.stdint", "cython_kernels._types", "numpy", "dorylus_hpc.graph"}
    assert broken_rules("cython_kernels._rows", names) == ["dorylus_hpc.graph is in a higher layer"]


def test_without_extras_all_programs_can_be_imported():
    """Whoever trains on the graph servers' own cores needs nothing of Lambda's."""
    program = """
import sys
for name in ("boto3", "botocore", "cryptography", "aiohttp", "awslambdaric", "psutil", "sklearn", "pyarrow"):
    sys.modules[name] = None
import dorylus_hpc.api, dorylus_hpc.prepare, dorylus_hpc.predict, dorylus_hpc.train
from dorylus_hpc.engine.lambda_backend import check_backend
from dorylus_hpc.config import TrainConfig
check_backend(TrainConfig())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
