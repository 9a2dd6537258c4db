"""Errors the user can act on."""

from __future__ import annotations


class InputError(ValueError):
    """Input that the user has to correct: a file, an option, a value.

    The message is one line that names what was received, where, and what to do. Entry points print
    it without a traceback and end with status 2.
    """
