"""Memory and processor of a sandbox: by cgroups where they are writable, else by watching.

A function with M megabytes has M of memory and M / 1769 of a processor, as at AWS. The kernel holds both
in a cgroup (version 2 or 1). Elsewhere a look every few milliseconds does: a process that has more memory
is killed, one that had more time than its share is stopped until it has not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from dorylus_hpc.errors import InputError

MB_PER_PROCESSOR = 1769
_PERIOD = 20_000  # microseconds over which the kernel measures the processor's share
_LOOK = 0.02  # seconds between two looks of the watchdog
_PREFIX = "dorylus-lambda-"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


class Bounds(Protocol):
    """The bounds of one sandbox."""

    def hold(self, pid: int) -> None:
        """Bound this process, which has just started, and those it starts."""

    def begin(self) -> None:
        """A call begins."""

    def end(self) -> None:
        """The call has ended."""

    def peak_bytes(self) -> int:
        """The most memory that the main process had so far."""

    def close(self) -> None:
        """The process has ended."""


class Limits:
    """What holds the bounds here.

    Parameters
    ----------
    kind
        ``auto``, ``cgroup``, ``watchdog`` or ``none``.
    memory_mb
        Memory of the function.

    Attributes
    ----------
    kind
        What was found: ``cgroup``, ``watchdog`` or ``none``.

    Raises
    ------
    InputError
        If cgroups were asked for and cannot be written.
    """

    def __init__(self, kind: str, memory_mb: int) -> None:
        self._memory_mb = memory_mb
        self._folders = _usable_folders(memory_mb) if kind in ("auto", "cgroup") else []
        self._left: list[Path] = []
        if kind == "cgroup" and not self._folders:
            raise InputError("--limits cgroup: no cgroup with memory and cpu can be made here; try watchdog")
        self.kind = "cgroup" if self._folders else "watchdog" if kind == "auto" else kind

    def bounds(self, name: str) -> Bounds:
        """Make the bounds of a sandbox of this name."""
        if self.kind == "cgroup":
            return _Cgroup([folder / name for folder in self._folders], self._memory_mb, self._left)
        return _Watchdog(self._memory_mb) if self.kind == "watchdog" else _Unbounded()

    def clean_up(self) -> bool:
        """Remove what sandboxes that have ended left, and say whether nothing is left.

        A cgroup can be removed a moment after its last process has ended, not at once.
        """
        self._left[:] = [folder for folder in self._left if not _removed(folder)]
        return not self._left


def processor_share(memory_mb: int) -> float:
    """Processors that a function with this memory has."""
    return memory_mb / MB_PER_PROCESSOR


class _Unbounded:
    """Only measures."""

    def __init__(self) -> None:
        self._pid = 0

    def hold(self, pid: int) -> None:
        self._pid = pid

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def peak_bytes(self) -> int:
        try:
            with open(f"/proc/{self._pid}/status") as file:
                peak = file.read().partition("VmHWM:")[2]
        except OSError:
            return 0
        return int(peak.split()[0]) * 1024 if peak else 0

    def close(self) -> None:
        pass


class _Watchdog(_Unbounded):
    """Looks now and then while a call runs, at the sandbox's main process."""

    def __init__(self, memory_mb: int) -> None:
        super().__init__()
        self._most = memory_mb * 2**20
        self._share = processor_share(memory_mb)
        self._timer: asyncio.TimerHandle | None = None
        self._since = (0.0, 0.0)
        self._stopped = False

    def begin(self) -> None:
        self.end()
        self._since = (asyncio.get_running_loop().time(), self._processor_seconds())
        self._look()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stopped:
            self._signal(signal.SIGCONT)
            self._stopped = False

    def close(self) -> None:
        self.end()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_LOOK, self._look)
        if self._bytes() > self._most:
            self._signal(signal.SIGKILL)
            return
        began, used = self._since
        ahead = self._processor_seconds() - used - self._share * (loop.time() - began)
        if (ahead > _LOOK) != self._stopped:
            self._stopped = not self._stopped
            self._signal(signal.SIGSTOP if self._stopped else signal.SIGCONT)

    def _bytes(self) -> int:
        try:
            with open(f"/proc/{self._pid}/statm") as file:
                return int(file.read().split()[1]) * _PAGE
        except OSError:
            return 0

    def _processor_seconds(self) -> float:
        try:
            with open(f"/proc/{self._pid}/stat") as file:
                values = file.read().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(values[11]) + int(values[12])) / _TICK

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, number)


class _Cgroup(_Unbounded):
    """One folder in version 2, one a controller in version 1."""

    def __init__(self, folders: list[Path], memory_mb: int, left: list[Path]) -> None:
        super().__init__()
        self._folders = folders
        self._left = left  # those that cannot be removed yet
        for folder in folders:
            folder.mkdir()
            _write_bounds(folder, memory_mb)

    def hold(self, pid: int) -> None:
        super().hold(pid)
        for folder in self._folders:
            with contextlib.suppress(ProcessLookupError):
                (folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        self._left += [folder for folder in self._folders if not _removed(folder)]


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write_bounds(folder: Path, memory_mb: int) -> None:
    """Write what the controllers in this folder take."""
    quota = int(processor_share(memory_mb) * _PERIOD)
    values = {
        "memory.max": memory_mb * 2**20,
        "memory.swap.max": 0,
        "cpu.max": f"{quota} {_PERIOD}",
        "memory.limit_in_bytes": memory_mb * 2**20,
        "memory.memsw.limit_in_bytes": memory_mb * 2**20,
        "cpu.cfs_period_us": _PERIOD,
        "cpu.cfs_quota_us": quota,
    }
    for name, value in values.items():
        if (folder / name).exists():
            (folder / name).write_text(str(value))


def _usable_folders(memory_mb: int) -> list[Path]:
    """The folders below which cgroups with memory and cpu can be made; none if one is missing."""
    folders = []
    for controller, needed in (("memory", "memory.limit_in_bytes"), ("cpu", "cpu.cfs_quota_us")):
        folder = _own_folder(controller)
        if folder is not None and _works(folder, [needed], memory_mb):
            folders.append(folder)
    if len(folders) < 2:
        folder = _own_folder("")
        usable = folder is not None and _works(folder, ["memory.max", "cpu.max"], memory_mb)
        folders = [folder] if folder is not None and usable else []
    for folder in folders:
        _remove_abandoned(folder)
    return folders


def _own_folder(controller: str) -> Path | None:
    """Where this process is in the hierarchy of a controller of version 1, or (``""``) of version 2."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next(
        (line.split(":", 2)[2] for line in groups if controller in line.split(":", 2)[1].split(",")), None
    )
    kind = "cgroup" if controller else "cgroup2"
    for line in mounts:
        left, _, right = line.partition(" - ")
        system, _, options = right.split(" ", 2)
        root, mount = left.split(" ")[3:5]
        if path is not None and system == kind and (not controller or controller in options.split(",")):
            inside = path.removeprefix(root) if root != "/" else path
            return Path(mount, inside.lstrip("/"))
    return None


def _works(folder: Path, needed: Iterable[str], memory_mb: int) -> bool:
    trial = folder / f"{_PREFIX}{os.getpid()}-trial"
    try:
        trial.mkdir()
    except OSError:
        return False
    try:
        _write_bounds(trial, memory_mb)
        return all((trial / name).exists() for name in needed)
    except OSError:
        return False
    finally:
        trial.rmdir()


def _remove_abandoned(folder: Path) -> None:
    """Remove what services that were killed left behind: their sandboxes have ended with them."""
    for left in folder.glob(f"{_PREFIX}*-*"):
        pid = left.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _removed(left)


def sandbox_name(number: int) -> str:
    """Name of a sandbox of this service; no other service's has it."""
    return f"{_PREFIX}{os.getpid()}-{number}"
