"""Where a command's output goes.

Knows files, stdout and stderr: tables for people, JSON for machines, and that JSON on stdout stands alone. Does not know
what is in them.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType

from numba_kv.config.read import show_path
from numba_kv.errors import InputError

__all__ = ["Output", "check_writable"]

#: Columns of a table that goes into a file or a pipe, unless COLUMNS says how many.
_PLAIN_WIDTH = 110


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal that cannot show a bar shows a question mark
    # Sizes are given, and not left to be read from the environment, where anything may stand; names may have brackets.
    lines = max(1, shutil.get_terminal_size().lines)
    return Console(stderr=stderr, highlight=False, markup=False, width=_width(stream), height=lines)


def _width(stream: TextIO | None) -> int:
    """Return the columns that COLUMNS states, those of a terminal, or those of a file."""
    stated = os.environ.get("COLUMNS", "")
    if re.fullmatch(r"0*[1-9][0-9]{0,3}", stated, re.ASCII):
        return int(stated)
    return max(1, shutil.get_terminal_size().columns) if stream is not None and stream.isatty() else _PLAIN_WIDTH


def check_writable(option: str, name: str | None) -> Path | None:
    """Return the path, having looked whether a file can be there: before the work, rather than after it.

    Raises
    ------
    InputError
        If the name is empty or too long, it is a folder, a device or write-protected, or its folder is or does not exist.
    """
    if name is None:
        return None
    if not name:
        raise InputError(f"{option}: the name is empty; name a file")
    path = Path(name)
    try:
        _check_place(option, name, path)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{option}: {show_path(name)} cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from None
    return path


def _check_place(option: str, name: str, path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise InputError(f"{option}: the folder of {show_path(name)} does not exist") from None
        path.touch(exist_ok=False)  # nothing else tells for sure that there can be a file
        path.unlink()
        return
    if stat.S_ISDIR(mode):
        raise InputError(f"{option}: {show_path(name)} is a folder; a file is wanted")
    if name == os.devnull:
        return
    if not stat.S_ISREG(mode):
        raise InputError(f"{option}: {show_path(name)} is a device or a pipe; a file is wanted")
    with path.open("ab"):  # as it is, and not changed
        pass


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
