"""``numba-kv replay --draft``: rounds of random acceptance on the caches of two models, audited as they go."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import numba_kv as kv
from numba_kv.cli import main
from numba_kv.errors import InvariantError
from numba_kv.replay.request import Request, Trace
from numba_kv.replay.run import ReplayOptions, replay
from numba_kv.replay.schedule import SchedulerOptions
from numba_kv.replay.speculation import ReplaySpeculation, SpeculativeScheduler, chain_or_tree
from tests.helpers.models import tiny_config

TINY = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_size": 8,
    "vocab_size": 32,
    "max_position_embeddings": 1024,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
RECURRENT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 1024,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


def written(path: Path, model: dict[str, Any]) -> str:
    path.write_text(json.dumps(model))
    return str(path)


def requests(folder: Path, lengths: list[tuple[int, int]]) -> str:
    """Write a trace of prompts and outputs of these lengths."""
    path = folder / "trace.jsonl"
    lines = [{"arrival_s": 0, "input_tokens": prompt, "output_tokens": output} for prompt, output in lengths]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def replayed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["replay", *args, "--target", "cpu", "--json", "-", "--audit-every", "5"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["audit"] == "ok"
    assert found["audits"] > 1
    return found


@pytest.mark.parametrize("model", [TINY, RECURRENT], ids=["windows", "recurrent"])
@pytest.mark.parametrize("branches", ["1", "2"])
def test_replay_with_a_draft(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: dict[str, Any], branches: str) -> None:
    base, draft = written(tmp_path / "base.json", model), written(tmp_path / "draft.json", TINY)
    trace = requests(tmp_path, [(i * 37 % 300 + 1, i * 23 % 61 + 1) for i in range(1, 13)])
    args = [base, trace, "--batch", "3", "--chunk", "64"]
    plain = replayed(capsys, *args)
    assert "speculation" not in plain
    found = replayed(capsys, *args, "--draft", draft, "--draft-branches", branches)
    rounds = found["speculation"]
    assert found["tokens"] == plain["tokens"]
    assert found["steps"] < plain["steps"]
    assert rounds["verify_tokens"] == 1 + 3 * int(branches)
    assert rounds["accepted_tokens"] == found["tokens"]["decode"]
    assert rounds["verified_rows"] < rounds["accepted_tokens"] <= 4 * rounds["verified_rows"]
    assert rounds["draft_steps"] > rounds["rounds"]
    assert main(["replay", *args, "--draft", draft, "--target", "cpu"]) == 0
    assert "of 4 tokens were kept" in capsys.readouterr().out


@pytest.mark.parametrize(("acceptance", "kept"), [("0", 1), ("1", 4)])
def test_what_is_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path, acceptance: str, kept: int) -> None:
    """None of the proposals, or all: a row keeps 1 token, or 4, until its request ends."""
    base = written(tmp_path / "base.json", TINY)
    found = replayed(
        capsys, base, requests(tmp_path, [(30, 40)] * 3), "--batch", "3", "--draft", base, "--acceptance", acceptance
    )
    assert found["speculation"]["rounds"] == 40 // kept
    assert found["tokens"] == {"prefill": 90, "decode": 120, "recomputed": 0, "total": 210}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--acceptance", "1.5"], ["--acceptance", "0 to 1"]),
        (["--acceptance", "nan"], ["--acceptance"]),
        (["--reuse"], ["--draft", "--reuse"]),
        (["--draft-steps", "5000"], ["--draft-steps", "leave no room"]),
        (["--draft-steps", "0"], ["--draft-steps", "below 1"]),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str], words: list[str]) -> None:
    base = written(tmp_path / "base.json", TINY)
    with_draft = [base, "generated", "--limit", "3", "--draft", base, *args, "--target", "cpu"]
    assert main(["replay", *with_draft]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_a_sequence_gives_way_where_pages_run_out() -> None:
    """Two rows of 40 tokens do not fit into 15 pages: the younger one waits, and all tokens are generated all the same."""
    base = tiny_config(None, 6, num_kv_pages=15, lookahead_pages=0, max_kv_cache_capacity=52, max_batch_tokens=96)
    draft = tiny_config(None, max_kv_cache_capacity=55, max_batch_tokens=96)
    three = tuple(Request(arrival_s=0, input_tokens=10, output_tokens=30, line=i + 1) for i in range(3))
    trace = Trace("three", "numba_kv", three)
    options = ReplayOptions(audit_every=5, speculation=ReplaySpeculation(acceptance=0.5))
    with kv.SharedResources.create_for_spec_decode(chain_or_tree(base, draft, 3, 1)) as resources:
        figures = replay(resources, trace, options).figures
    assert figures.preemptions > 0
    assert figures.decode_tokens + figures.prefill_tokens == 3 * 40 + figures.recomputed_tokens
    alone = replace(base, num_kv_pages=13)
    too_long = Trace("one", "numba_kv", three[:1])
    with kv.SharedResources.create_for_spec_decode(chain_or_tree(alone, draft, 3, 1)) as resources:
        assert replay(resources, too_long, options).figures.decode_tokens == 30


def test_lengths_that_differ_are_found() -> None:
    base = tiny_config(None, max_batch_tokens=96)
    draft = tiny_config(None, max_kv_cache_capacity=67, max_batch_tokens=96)
    with (
        kv.SharedResources.create_for_spec_decode(chain_or_tree(base, draft, 3, 1)) as resources,
        kv.SpeculativeBatch(resources) as batch,
    ):
        one = [Request(arrival_s=0, input_tokens=10, output_tokens=30, line=1)]
        scheduler = SpeculativeScheduler(batch, one, SchedulerOptions(), ReplaySpeculation())
        for _ in range(3):
            scheduler.step()
        batch.sync_lengths()
        scheduler.check_lengths()
        batch.rewind({batch.sequences[0]: 1})
        with pytest.raises(InvariantError, match="were kept"):
            scheduler.check_lengths()
