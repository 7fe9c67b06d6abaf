"""Reading traces: three file formats, one `Request`.

Knows how a line becomes a request and what makes a line wrong. Does not know caches, capacities or schedules.

==========  =========================================================  ==================
format      a line                                                     time
==========  =========================================================  ==================
mooncake    JSON: timestamp, input_length, output_length, hash_ids     ms after the start
azure       CSV under ``TIMESTAMP,ContextTokens,GeneratedTokens``      date and time
numba_kv    JSON: arrival_s, input_tokens, output_tokens[, hash_ids]   s after the start
==========  =========================================================  ==================

The format is recognised by the first line that is not blank. Blank lines are skipped everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import islice
from pathlib import Path

from numba_kv.config.read import check_regular, parse_json, show_path
from numba_kv.errors import TraceError
from numba_kv.geometry import INT32_MAX
from numba_kv.replay.request import Request, Trace, TraceFormat

__all__ = ["AZURE_HEADER", "read_trace"]

AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
_OWN_KEYS = ("arrival_s", "input_tokens", "output_tokens")
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?")
_MOST_TIME = 10**15
#: Characters of a line: a prompt of a million tokens lists its hash ids in a fraction of that.
_MOST_CHARACTERS = 16 << 20
_DIGITS = re.compile(r"-?[0-9]{1,18}")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class _Line:
    """A line being read: names itself in every complaint."""

    __slots__ = ("file", "number")

    def __init__(self, file: str, number: int) -> None:
        self.file = file
        self.number = number

    def error(self, field: str, value: object, wanted: str) -> TraceError:
        return TraceError(f"{self.file}, line {self.number}: {field} is {_shown(value)}; {wanted}")

    def plain_error(self, text: str) -> TraceError:
        return TraceError(f"{self.file}, line {self.number}: {text}")

    def field(self, record: dict[str, object], name: str) -> object:
        if name not in record:
            raise self.plain_error(f"field {name!r} is missing; the line has {', '.join(map(repr, record)) or 'no field'}")
        return record[name]

    def tokens(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, value, "an integer is wanted")
        if not 1 <= value <= INT32_MAX:
            raise self.error(name, value, f"a token count from 1 to {INT32_MAX} is wanted")
        return value

    def seconds(self, name: str, value: object, scale: float) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, value, "a number is wanted")
        if not 0 <= value <= _MOST_TIME:  # also false for NaN
            raise self.error(name, value, f"a number from 0 to {_MOST_TIME} is wanted")
        return value * scale

    def hash_ids(self, value: object) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error("hash_ids", value, "a list of integers is wanted")
        return tuple(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _json_object(line: _Line, text: str) -> dict[str, object]:
    try:
        record = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise line.plain_error(f"broken JSON ({str(error)[:100]}): {_shown(text)}") from None
    if not isinstance(record, dict):
        raise line.plain_error(f"a JSON object is wanted, the line holds {_shown(record)}")
    return record


def _json_request(line: _Line, text: str, keys: tuple[str, str, str], scale: float) -> Request:
    record = _json_object(line, text)
    arrival, given, made = (line.field(record, key) for key in keys)
    return Request(
        line.seconds(keys[0], arrival, scale),
        line.tokens(keys[1], given),
        line.tokens(keys[2], made),
        line.hash_ids(record["hash_ids"]) if "hash_ids" in record else (),
        line.number,
    )


def _mooncake_request(line: _Line, text: str) -> Request:
    return _json_request(line, text, _MOONCAKE_KEYS, 1e-3)


def _own_request(line: _Line, text: str) -> Request:
    return _json_request(line, text, _OWN_KEYS, 1.0)


def _azure_request(line: _Line, text: str) -> Request:
    cells = [cell.strip() for cell in text.split(",")]
    if len(cells) != len(AZURE_HEADER):
        raise line.plain_error(
            f"{len(cells)} fields in {_shown(text)}; {len(AZURE_HEADER)} are wanted: {', '.join(AZURE_HEADER)}"
        )
    counts = []
    for name, cell in zip(AZURE_HEADER[1:], cells[1:], strict=True):
        if not _DIGITS.fullmatch(cell):
            raise line.error(name, cell, "an integer is wanted")
        counts.append(line.tokens(name, int(cell)))
    return Request(_azure_seconds(line, cells[0]), counts[0], counts[1], (), line.number)


def _azure_seconds(line: _Line, cell: str) -> float:
    # Seven decimals are written, which `fromisoformat` of Python 3.10 refuses.
    match = _AZURE_TIME.fullmatch(cell)
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(f"{match[1]}T{match[2]}+00:00")
    except ValueError:
        raise line.error(AZURE_HEADER[0], cell, "a time like 2023-11-16 18:15:46.6805900 is wanted") from None
    return (moment - _EPOCH) / timedelta(seconds=1) + float(f"0.{match[3] or 0}")


def _recognise(line: _Line, text: str) -> tuple[TraceFormat, Callable[[_Line, str], Request]]:
    """Tell the format by the first line; a line that is nearly right is judged by the format it is nearest to."""
    if text.startswith("{"):
        record = _json_object(line, text)
        if any(key in record for key in _MOONCAKE_KEYS):
            return "mooncake", _mooncake_request
        if any(key in record for key in _OWN_KEYS):
            return "numba_kv", _own_request
    elif tuple(cell.strip() for cell in text.split(",")) == AZURE_HEADER:
        return "azure", _azure_request
    raise line.plain_error(
        f"unknown trace format, the line is {_shown(text)}; known are JSON lines with {', '.join(_MOONCAKE_KEYS)} (Mooncake), "
        f"JSON lines with {', '.join(_OWN_KEYS)} (numba_kv) and CSV under {','.join(AZURE_HEADER)} (Azure)"
    )


def _text_lines(path: Path) -> Iterator[tuple[_Line, str]]:
    number = 0
    try:
        check_regular(path)
        with path.open(encoding="utf-8-sig") as file:
            for number, raw in enumerate(iter(lambda: file.readline(_MOST_CHARACTERS), ""), 1):
                if len(raw) == _MOST_CHARACTERS:
                    raise TraceError(f"{path}, line {number}: longer than {_MOST_CHARACTERS} characters; a line is a request")
                text = raw.strip()
                if text:
                    yield _Line(str(path), number), text
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}, after line {number}: not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise TraceError(f"trace {show_path(path)} cannot be read: {error.strerror or error}") from None


def _requests(lines: Iterable[tuple[_Line, str]], read: Callable[[_Line, str], Request]) -> Iterator[Request]:
    for line, text in lines:
        yield read(line, text)


def read_trace(path: str | Path, *, limit: int | None = None) -> Trace:
    """Read the requests of a trace file.

    Parameters
    ----------
    path : str or Path
        A Mooncake JSONL, an Azure CSV or a file of the project's own JSONL.
    limit : int, optional
        Stop after that many requests; what comes later in the file is not looked at.

    Raises
    ------
    TraceError
        Naming the file, the line, the field and the value: broken JSON, a missing field, a wrong type, a length below 1,
        a negative time; or if the file cannot be read, holds no request or has an unknown format.
    """
    if not str(path):
        raise TraceError("path: the name is empty; name a file")
    file = Path(path)
    if limit is not None and limit < 1:
        raise TraceError(f"limit: {limit} requests; at least 1 is wanted")
    lines = _text_lines(file)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{file}: the file is empty; a trace has at least one request")
    kind, read = _recognise(*first)
    if kind == "azure":
        requests = list(islice(_requests(lines, read), limit))
        start = min((r.arrival_s for r in requests), default=0.0)
        requests = [replace(r, arrival_s=r.arrival_s - start) for r in requests]
    else:
        requests = [read(*first), *islice(_requests(lines, read), None if limit is None else limit - 1)]
    if not requests:
        raise TraceError(f"{file}: a header but no request; a trace has at least one")
    return Trace(file.name, kind, tuple(requests))
