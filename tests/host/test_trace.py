"""Trace readers: good files give requests, every bad line is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from numba_kv.errors import InputError, TraceError
from numba_kv.replay.generate import GeneratorOptions, generate_trace
from numba_kv.replay.request import Request, Trace, fit_to_capacity
from numba_kv.replay.trace import read_trace

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"

MOONCAKE = '{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]}\n'
OWN = '{"arrival_s": 0.25, "input_tokens": 12, "output_tokens": 3}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"


def write(tmp_path: Path, text: str | bytes, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE * 2))
    assert trace.format == "mooncake"
    assert trace.requests == (Request(1.5, 600, 7, (0, 4), 1), Request(1.5, 600, 7, (0, 4), 2))


def test_own_format_with_and_without_hash_ids(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, OWN + "\n" + OWN.replace("}", ', "hash_ids": []}')))
    assert trace.format == "numba_kv"
    assert [r.line for r in trace.requests] == [1, 3]
    assert trace.requests[0] == Request(0.25, 12, 3, (), 1)


def test_azure_times_are_relative_to_the_earliest(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE))
    assert trace.format == "azure"
    assert [(r.input_tokens, r.output_tokens, r.line) for r in trace.requests] == [(374, 44, 2), (396, 109, 3)]
    assert trace.requests[0].arrival_s == 0.0
    assert trace.requests[1].arrival_s == pytest.approx(4.314579, abs=1e-5)


def test_azure_takes_the_later_release_with_a_time_zone(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01+00:00,5,6\n2024-05-10 00:00:00.5+00:00,7,8\n"
    trace = read_trace(write(tmp_path, text))
    assert [r.arrival_s for r in trace.requests] == [0.5, 0.0]


def test_limit_stops_before_a_later_bad_line(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE * 2 + "broken\n")
    assert len(read_trace(path, limit=2).requests) == 2
    with pytest.raises(TraceError, match="line 3"):
        read_trace(path, limit=3)
    with pytest.raises(TraceError, match="limit: 0"):
        read_trace(path, limit=0)


def test_byte_order_mark_and_blank_lines(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, b"\xef\xbb\xbf\n  \n" + OWN.encode()))
    assert trace.requests[0].line == 3


MOONCAKE_WITH = [
    ({"input_length": -5}, ["line 2", "input_length", "-5"]),
    ({"input_length": 0}, ["line 2", "input_length", "is 0"]),
    ({"output_length": 0}, ["line 2", "output_length", "is 0"]),
    ({"output_length": 2.5}, ["line 2", "output_length", "2.5", "integer"]),
    ({"output_length": True}, ["line 2", "output_length", "True", "integer"]),
    ({"output_length": "7"}, ["line 2", "output_length", "'7'", "integer"]),
    ({"output_length": None}, ["line 2", "output_length", "None"]),
    ({"input_length": 2**31}, ["line 2", "input_length", str(2**31)]),
    ({"timestamp": -1}, ["line 2", "timestamp", "-1"]),
    ({"timestamp": "soon"}, ["line 2", "timestamp", "'soon'", "number"]),
    ({"timestamp": float("nan")}, ["line 2", "timestamp", "nan"]),
    ({"timestamp": float("inf")}, ["line 2", "timestamp", "inf"]),
    ({"timestamp": 10**400}, ["line 2", "timestamp"]),
    ({"hash_ids": "0, 4"}, ["line 2", "hash_ids", "'0, 4'", "list"]),
    ({"hash_ids": [0, 1.5]}, ["line 2", "hash_ids", "1.5"]),
]


@pytest.mark.parametrize(("change", "words"), MOONCAKE_WITH, ids=lambda value: str(value)[:40])
def test_bad_value(tmp_path: Path, change: dict[str, object], words: list[str]) -> None:
    bad = json.dumps({**json.loads(MOONCAKE), **change})
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path, MOONCAKE + bad))
    for word in ["trace", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("good", "field"), [(MOONCAKE, "output_length"), (MOONCAKE, "timestamp"), (OWN, "arrival_s"), (OWN, "input_tokens")]
)
@pytest.mark.parametrize("line", [1, 2])
def test_missing_field(tmp_path: Path, good: str, field: str, line: int) -> None:
    record = json.loads(good)
    del record[field]
    with pytest.raises(TraceError, match=rf"line {line}: field '{field}' is missing"):
        read_trace(write(tmp_path, good * (line - 1) + json.dumps(record)))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "empty"),
        ("\n \n", "empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ("hello\n", "line 1: unknown trace format"),
        ('{"prompt": 5}\n', "line 1: unknown trace format"),
        ("{}\n", "line 1: unknown trace format"),
        ("time,in,out\n1,2,3\n", "line 1: unknown trace format"),
        ("{\n", "line 1: broken JSON"),
        ('{"timestamp": 0, "input_length": 5', "line 1: broken JSON"),
        (MOONCAKE + "[1, 2, 3]", "line 2: a JSON object is wanted"),
        (MOONCAKE + "[" * 100_000, "line 2: broken JSON"),
        (MOONCAKE + '{"timestamp": ' + "9" * 5000 + "}", "line 2: "),
        (b"\xff\xfe\x00", "not UTF-8"),
        (AZURE + "\r\n2023-11-16 18:15:50,396", "line 4: 2 fields"),
        (AZURE + "\r\n2023-11-16 18:15:50,396,5,6", "line 4: 4 fields"),
        (AZURE + "\r\nyesterday,396,5", "line 4: TIMESTAMP is 'yesterday'"),
        (AZURE + "\r\n2023-13-16 18:15:50,396,5", "line 4: TIMESTAMP is '2023-13-16 18:15:50'"),
        (AZURE + "\r\n2023-11-16 18:15:50,-396,5", "line 4: ContextTokens is -396"),
        (AZURE + "\r\n2023-11-16 18:15:50,396,0", "line 4: GeneratedTokens is 0"),
        (AZURE + "\r\n2023-11-16 18:15:50,396,x", "line 4: GeneratedTokens is 'x'"),
        (AZURE + "\r\n2023-11-16 18:15:50,3.5,2", "line 4: ContextTokens is '3.5'"),
        (AZURE + "\r\n2023-11-16 18:15:50,٣,2", "line 4: ContextTokens"),
    ],
)
def test_bad_file(tmp_path: Path, text: str | bytes, match: str) -> None:
    with pytest.raises(TraceError, match=match):
        read_trace(write(tmp_path, text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.jsonl cannot be read: No such file"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)


def test_too_long_is_an_error_or_skipped() -> None:
    trace = Trace("t.jsonl", "numba_kv", (Request(0.0, 10, 5, (), 1), Request(0.0, 90, 11, (), 2), Request(0.0, 300, 1, (), 3)))
    assert trace.longest == 301
    with pytest.raises(
        TraceError, match=r"t\.jsonl, line 2: the request is 101 tokens long .* capacity of a row is 100;.*2 of 3"
    ):
        fit_to_capacity(trace, 100)
    fitting, skipped = fit_to_capacity(trace, 100, skip_too_long=True)
    assert (len(fitting.requests), skipped) == (1, 2)
    assert fit_to_capacity(trace, 301) == (trace, 0)
    with pytest.raises(TraceError, match="all 3 requests are longer than the capacity of 14"):
        fit_to_capacity(trace, 14, skip_too_long=True)


def test_generated_is_decided_by_the_seed() -> None:
    first = generate_trace(50, GeneratorOptions(seed=3))
    assert first == generate_trace(50, GeneratorOptions(seed=3))
    assert first.requests[:20] == generate_trace(20, GeneratorOptions(seed=3)).requests
    assert first.requests != generate_trace(50, GeneratorOptions(seed=4)).requests
    assert first.requests != generate_trace(50, GeneratorOptions(seed=-3)).requests


def test_generated_requests_are_within_their_limits() -> None:
    trace = generate_trace(500, GeneratorOptions(max_total_tokens=256))
    assert all(r.input_tokens >= 1 and r.output_tokens >= 1 and r.total_tokens <= 256 for r in trace.requests)
    assert trace.longest == 256
    arrivals = [r.arrival_s for r in trace.requests]
    assert arrivals == sorted(arrivals)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_total_tokens": 1},
        {"input_median": 0},
        {"output_sigma": -1.0},
        {"requests_per_s": 0.0},
        {"requests_per_s": float("nan")},
    ],
    ids=str,
)
def test_generator_refuses(bad: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        GeneratorOptions(**bad)  # type: ignore[arg-type]


def test_generator_refuses_no_requests() -> None:
    with pytest.raises(InputError, match="num_requests: 0"):
        generate_trace(0)


@pytest.mark.skipif(not DATA.is_dir(), reason="the real traces are not beside the checkout (../shared/data)")
@pytest.mark.parametrize(
    ("name", "kind", "requests", "tokens_in", "tokens_out", "longest"),
    [
        ("mooncake_conversation.jsonl", "mooncake", 12_031, 144_793_823, 4_122_048, 126_527),
        ("azure_llm_2023_conv.csv", "azure", 19_366, 22_361_870, 4_088_665, 14_089),
    ],
)
def test_real_traces(name: str, kind: str, requests: int, tokens_in: int, tokens_out: int, longest: int) -> None:
    trace = read_trace(DATA / name)
    assert trace.format == kind
    assert len(trace.requests) == requests
    assert (trace.input_tokens, trace.output_tokens, trace.longest) == (tokens_in, tokens_out, longest)
    assert trace.requests[0].arrival_s == 0.0
    if kind == "mooncake":
        assert all(len(r.hash_ids) == -(-r.input_tokens // 512) for r in trace.requests)
