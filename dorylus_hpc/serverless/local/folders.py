"""Where things lie on disk: the function's code, the runtime, a private folder for each sandbox."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dorylus_hpc.errors import InputError
from dorylus_hpc.serverless.archive import UNREADABLE, link, link_installed


@dataclass(frozen=True)
class Folders:
    """The folders of a service.

    Attributes
    ----------
    task
        The unpacked archive, ``/var/task`` at AWS. All sandboxes read it.
    runtime
        The runtime client and what it needs.
    sandboxes
        Has a folder for each sandbox.
    code_sha256
        Of the archive, in base64.
    code_bytes
        Size of the archive.
    """

    task: Path
    runtime: Path
    sandboxes: Path
    code_sha256: str
    code_bytes: int


def lay_out(folder: Path, archive: Path | None) -> Folders:
    """Make the folders of a service below `folder`.

    Raises
    ------
    InputError
        If the archive cannot be unpacked, or the runtime client is not installed.
    """
    folder = folder.absolute()
    task, runtime, sandboxes = folder / "task", folder / "runtime", folder / "sandboxes"
    for one in (runtime, sandboxes):
        one.mkdir()
    if archive is None:
        sha256 = link_installed(task)
    elif archive.is_dir():
        sha256 = _link_folder(archive, task)
    else:
        sha256 = _unpack(archive, task)
    _link_runtime(runtime)
    size = archive.stat().st_size if archive is not None and archive.is_file() else 0
    return Folders(task, runtime, sandboxes, sha256, size)


def _unpack(archive: Path, task: Path) -> str:
    if not archive.is_file():  # a device may have no end
        raise InputError(f"--archive {archive} is neither file nor folder")
    try:
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(task)
        content = archive.read_bytes()
    except UNREADABLE as error:
        raise InputError(f"--archive {archive} cannot be unpacked: {error}") from None
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


def _link_folder(archive: Path, task: Path) -> str:
    """Links, not the folder itself: a sandbox writes compiled modules beside the sources."""
    task.mkdir()
    digest = hashlib.sha256()
    for path in sorted(path for path in archive.rglob("*") if path.is_file()):
        name = path.relative_to(archive)
        if "__pycache__" not in name.parts:
            link(path, task / name)
            digest.update(f"{name.as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
    return base64.b64encode(digest.digest()).decode()


def _link_runtime(runtime: Path) -> None:
    """Lay the runtime client and what it requires into a folder of its own.

    The sandbox's import path ends there in place of this environment's packages, which a function at AWS
    does not see either.
    """
    waiting, seen = ["awslambdaric"], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise InputError(
                f"the local Lambda service needs {name}, which is not installed: pip install {name}"
            ) from None
        plain = (text for text in distribution.requires or () if "extra ==" not in text)
        waiting += [match.group() for match in (re.match(r"[\w.-]+", text) for text in plain) if match]
        tops = {path.parts[0] for path in distribution.files or () if ".." not in path.parts}
        for top in tops:
            if not top.endswith((".dist-info", "__pycache__")):
                os.symlink(str(distribution.locate_file(top)), runtime / top)
