"""Where a command's output goes.

Knows files, stdout and stderr: tables for people, JSON for machines, and that JSON on stdout stands alone. Does not know
what is in them.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

from rich.console import Console, RenderableType

from numba_kv.errors import InputError

__all__ = ["Output", "check_writable"]

#: Columns of a table that goes into a file or a pipe, unless COLUMNS says how many.
_PLAIN_WIDTH = 110


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal that cannot show a bar shows a question mark
    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdecimal():  # which rich takes
        return console
    return Console(stderr=stderr, highlight=False, width=_PLAIN_WIDTH)


def check_writable(option: str, name: str | None) -> Path | None:
    """Return the path, having looked whether a file can be there: before the work, rather than after it.

    Raises
    ------
    InputError
        If it is a folder, or its folder does not exist.
    """
    if name is None:
        return None
    path = Path(name)
    if path.is_dir():
        raise InputError(f"{option}: {name} is a folder; a file is wanted")
    if not path.parent.is_dir():
        raise InputError(f"{option}: the folder of {name} does not exist")
    return path


class Output:
    """The streams of one command.

    Parameters
    ----------
    json_file : str or None
        ``"-"`` is stdout, which then takes JSON alone.
    """

    def __init__(self, json_file: str | None) -> None:
        self._json_to_stdout = json_file == "-"
        self._json_path = None if self._json_to_stdout else check_writable("--json", json_file)
        #: For tables.
        self.console = _console(stderr=self._json_to_stdout)
        #: For progress.
        self.progress_console = _console(stderr=True)

    def show(self, renderable: RenderableType) -> None:
        """Show something to people."""
        self.console.print(renderable)

    def write_json(self, data: object) -> None:
        """Write `data` where ``--json`` asks for it, or nowhere.

        Raises
        ------
        InputError
            If the file cannot be written.
        """
        if self._json_to_stdout:
            sys.stdout.write(dumps(data))
        elif self._json_path is not None:
            write_text(self._json_path, dumps(data))


def dumps(data: object) -> str:
    """Return `data` as indented JSON; NaN is an error."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a text file.

    Raises
    ------
    InputError
        If it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None
