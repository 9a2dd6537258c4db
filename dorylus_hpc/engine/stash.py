"""Which versions of the weights a parameter server keeps, and for whom. Pure.

An interval takes one version at its first AV of an epoch and uses it in all layers, forward and backward
(weight stashing: Dorylus, OSDI '21, section 5.1, after PipeDream). The version lives on the server that
the interval is bound to until its backward is done.
"""

from __future__ import annotations

from collections.abc import Hashable


class VersionStore:
    """The versions that one parameter server keeps.

    Parameters
    ----------
    newest
        The version to begin with; 0 are the initial weights.

    Attributes
    ----------
    newest : int
        The last published version.
    """

    def __init__(self, newest: int = 0) -> None:
        self.newest = newest
        self._users: dict[int, int] = {newest: 0}
        self._bound: dict[Hashable, int] = {}

    @property
    def live(self) -> tuple[int, ...]:
        """Versions kept: the newest, and those that somebody is bound to."""
        return tuple(sorted(self._users))

    @property
    def load(self) -> int:
        """How many are bound here."""
        return len(self._bound)

    def publish(self, version: int) -> tuple[int, ...]:
        """Make a version the newest and return those that are not needed any more.

        Raises
        ------
        ValueError
            It is not the next one.
        """
        if version != self.newest + 1:
            raise ValueError(f"version {version} published after {self.newest}")
        before, self.newest = self.newest, version
        self._users[version] = 0
        return self._free(before)

    def bind(self, who: Hashable, least: int) -> int | None:
        """Bind somebody to the newest version, if it is at least this one; None otherwise.

        Raises
        ------
        ValueError
            Already bound.
        """
        if who in self._bound:
            raise ValueError(f"{who} is bound to version {self._bound[who]} already")
        if self.newest < least:
            return None
        self._bound[who] = self.newest
        self._users[self.newest] += 1
        return self.newest

    def version_of(self, who: Hashable) -> int:
        """Return the version that somebody is bound to.

        Raises
        ------
        KeyError
            Not bound.
        """
        return self._bound[who]

    def release(self, who: Hashable) -> tuple[int, ...]:
        """End a binding and return the versions that are not needed any more.

        Raises
        ------
        KeyError
            Not bound.
        """
        version = self._bound.pop(who)
        self._users[version] -= 1
        return self._free(version)

    def _free(self, version: int) -> tuple[int, ...]:
        if version == self.newest or self._users[version]:
            return ()
        del self._users[version]
        return (version,)
