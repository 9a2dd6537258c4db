"""A model of the user's own: read from a file, built, tried, and kept with the run."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dorylus_hpc.comm.failure import together
from dorylus_hpc.engine.checkpoint import SavedModel
from dorylus_hpc.engine.trial import try_program
from dorylus_hpc.errors import InputError
from dorylus_hpc.files import atomic_path
from dorylus_hpc.graph.normalise import AGGREGATES
from dorylus_hpc.nn.check import check_program
from dorylus_hpc.nn.layers import Layer
from dorylus_hpc.nn.own import complete, stack
from dorylus_hpc.nn.program import Program

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

COPY = "model.py"  # in the run's folder
BUILD = "build"
_TRIAL_WIDTH = 9  # columns of features in a trial, at most


@dataclass(frozen=True, eq=False)
class OwnModel:
    """A model that is not built in.

    Attributes
    ----------
    name
        Of the class or function.
    aggregate
        What its edges want, a name of `dorylus_hpc.graph.normalise`.
    make
        Returns the program; arguments by name are those of `dorylus_hpc.nn.own.stack`.
    path
        The file it comes from; empty: from none.
    source
        The file's contents.
    """

    name: str
    aggregate: str
    make: Callable[..., Program]
    path: str = ""
    source: bytes = b""

    @property
    def sha256(self) -> str:
        """Digest of the file."""
        return sha256(self.source).hexdigest()

    @property
    def told(self) -> str:
        """Where it comes from, for messages."""
        return f"{self.path}, {self.name}" if self.path else self.name

    def build(self, **options: Any) -> Program:
        """Return the program, completed and checked.

        Raises
        ------
        InputError
            The file and what is wrong in it.
        """
        with _blaming(self):
            program = self.make(**options)
            if not isinstance(program, Program):
                raise InputError(f"it must return a Program, but returned {type(program).__name__}")
            program = complete(program)
            check_program(program, n_classes=options["n_classes"])
        return program

    def attempt(self, **options: Any) -> None:
        """Run the model on a small graph, with as many features as are enough to find mistakes.

        Raises
        ------
        InputError
            The file and what is wrong in it.
        """
        options["n_features"] = min(options["n_features"], _TRIAL_WIDTH)
        program = self.build(**options)
        with _blaming(self):
            try_program(program, self.aggregate, options["n_features"], sparse=options["sparse_features"])


@contextmanager
def _blaming(model: OwnModel) -> Iterator[None]:
    """Tell of whatever goes wrong in a line, with the file and, where it is known, its line."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{model.told}: {error}") from error
    except Exception as error:
        raise InputError(_blame(model.path or model.name, error)) from error


def _blame(path: str, error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines = [error.lineno]
    place = f"{path}:{lines[-1]}" if lines else path
    told = " ".join(str(error).split()) if not isinstance(error, SyntaxError) else error.msg
    return ": ".join([place, *getattr(error, "__notes__", ()), type(error).__name__, told])


def own_model(thing: Any, *, aggregate: str = "", path: str = "", source: bytes = b"") -> OwnModel:
    """Make a model of a class derived from `Layer`, or of a function that returns a `Program`.

    Parameters
    ----------
    thing
        The class or function.
    aggregate
        What its edges want, where it has no attribute ``aggregate``.
    path, source
        The file it comes from.

    Raises
    ------
    InputError
        It is neither, or the aggregate is missing or unknown.
    """
    name = getattr(thing, "__name__", type(thing).__name__)
    told = f"{path}, {name}" if path else name
    if inspect.isclass(thing) and issubclass(thing, Layer):
        missing = sorted(thing.__abstractmethods__)
        if missing:
            raise InputError(f"{told}: the methods {', '.join(missing)} are missing")

        def make(**options: Any) -> Program:
            return stack(thing, **options)
    elif callable(thing) and not inspect.isclass(thing):
        make = thing
    else:
        raise InputError(f"{told} must be a class derived from Layer, or a function that returns a Program")
    aggregate = getattr(thing, "aggregate", "") or aggregate
    if aggregate not in AGGREGATES:
        raise InputError(
            f"{told}: aggregate must tell what it takes from neighbours, one of {', '.join(AGGREGATES)}, "
            f"got {aggregate!r}"
        )
    return OwnModel(name, aggregate, make, path, source)


def split_name(model_file: str) -> tuple[str, str]:
    """Split ``FILE.py:NAME`` into file and name; the name may be missing."""
    path, colon, name = model_file.rpartition(":")
    return (path, name) if colon and path and name.isidentifier() else (model_file, "")


def read_model(model_file: str, *, copy: Path | None = None, digest: str = "") -> OwnModel:
    """Read a model from a file; this runs the file.

    Parameters
    ----------
    model_file
        ``FILE.py``, or ``FILE.py:NAME`` of the class or function. Without a name it is the function
        ``build``, or else the only class derived from `Layer` that the file makes.
    copy
        Read this file instead.
    digest
        SHA-256 that the copy must have.

    Raises
    ------
    InputError
        The file is missing, is not the one that was, cannot be run, or has no such model.
    """
    original, name = split_name(model_file)
    path = original if copy is None else str(copy)
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        hint = "" if copy is None else f": put {original} there, as it was when the model was trained"
        raise InputError(f"{path}: the file of the model cannot be read ({error.strerror}){hint}") from error
    if digest and sha256(source).hexdigest() != digest:
        raise InputError(
            f"{path} is not the file that the model was trained with: put that one there (SHA-256 {digest})"
        )
    module = ModuleType(f"dorylus_own_model_{sha256(source).hexdigest()[:16]}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look there for the names in annotations
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise InputError(_blame(path, error)) from error
    thing = _find(module, path, name)
    return own_model(thing, aggregate=getattr(module, "aggregate", ""), path=path, source=source)


def _find(module: ModuleType, path: str, name: str) -> Any:
    if name:
        if not hasattr(module, name):
            raise InputError(f"{path} has no {name}")
        return getattr(module, name)
    if hasattr(module, BUILD):
        return getattr(module, BUILD)
    classes = {
        key: found
        for key, found in vars(module).items()
        if inspect.isclass(found) and issubclass(found, Layer) and found.__module__ == module.__name__
    }
    if len(classes) != 1:
        found = f"has the classes {', '.join(classes)}" if classes else "has none"
        raise InputError(
            f"{path} must have one class derived from Layer, or a function {BUILD}, but {found}: name the "
            f"one that is meant, as in {path}:NAME"
        )
    return next(iter(classes.values()))


def file_of(model: Any) -> Any:
    """Return ``FILE.py:NAME`` of a class or function, and a path as text; anything else as it is.

    Raises
    ------
    InputError
        The class or function was not imported from a file: a prediction could not read it again.
    """
    if isinstance(model, Path):
        return str(model)
    if not callable(model):
        return model
    name = getattr(model, "__qualname__", "")
    try:
        path = inspect.getsourcefile(model)
    except (TypeError, OSError):  # there is no file
        path = None
    if path is None or not Path(path).is_file() or not name.isidentifier() or model.__module__ == "__main__":
        raise InputError(
            f"--model-file: {name or model!r} must be imported from a file that has nothing but the model, "
            "since predictions read that file again: move it there"
        )
    return f"{path}:{name}"


def keep_copy(model: OwnModel, run_dir: Path) -> None:
    """Write the file beside the checkpoint that will need it."""
    with atomic_path(run_dir / COPY) as temporary:
        temporary.write_bytes(model.source)


def model_of_run(run_dir: Path, model: SavedModel) -> OwnModel | None:
    """Read the model that a run kept; None if it is a built-in one.

    Raises
    ------
    InputError
        The copy is missing, or was changed.
    """
    if not model.model_sha256:
        return None
    return read_model(model.config["model_file"], copy=run_dir / COPY, digest=model.model_sha256)


def agree_on_model(comm: Intracomm, model_file: str) -> OwnModel | None:
    """Read the model on every rank, and make sure that it is the same; None without a file. Collective.

    Raises
    ------
    AgreedError
        See `read_model`; or files differ.
    """
    if not model_file:
        return None
    model = together(comm, lambda: read_model(model_file))
    digests = comm.allgather(model.sha256)

    def check() -> None:
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise InputError(
                f"--model-file {model_file} is another file on rank {other} (SHA-256 "
                f"{digests[other][:12]}...) than on rank 0 ({digests[0][:12]}...): give all ranks the same"
            )

    together(comm, check)
    return model
