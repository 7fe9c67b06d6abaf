"""``numba-kv replay --reuse``: prompts begin with what earlier ones left, and the figures say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from numba_kv.cli import main
from numba_kv.config import load_engine_config
from numba_kv.plan import plan_memory

TINY = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_size": 8,
    "vocab_size": 32,
    "max_position_embeddings": 2048,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def replayed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["replay", *args, "--target", "cpu", "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["audit"] == "ok"
    return found


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main([*args]) != 0
    return " ".join(capsys.readouterr().err.split())


def same_beginnings(path: Path) -> Path:
    """Write a trace of four prompts of three blocks: two begin with two common blocks, two are equal."""
    ids = ([0, 1, 2], [0, 1, 3], [0, 1, 3], [7, 8, 9])
    lines = [
        json.dumps({"timestamp": 1000 * i, "input_length": 1200, "output_length": 5, "hash_ids": blocks})
        for i, blocks in enumerate(ids)
    ]
    path.write_text("\n".join(lines))
    return path


def test_replay_with_reuse(capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path) -> None:
    trace = str(same_beginnings(tmp_path / "t.jsonl"))
    args = (config, trace, "--batch", "1", "--chunk", "4096", "--page-tokens", "8", "--capacity", "1280", "--audit-every", "1")
    found = replayed(capsys, *args, "--reuse", "--reuse-every", "0")
    reuse = found["reuse"]
    assert reuse["misses"] == {
        "full: unknown_identity": 1,
        "window 0: window_copies": 1,
        "full: last_token": 1,
        "full: diverged": 1,
    }
    assert reuse["looked_up_tokens"] == 4800
    assert reuse["matched_tokens"] == 1024 + 1200
    assert reuse["reused_tokens"] + found["tokens"]["prefill"] == 4800
    assert found["tokens"]["recomputed"] == 0
    # The second prompt leaves the first one where no copies of its window are; the third begins with all of the second.
    assert 1190 <= reuse["reused_tokens"] < 1200
    assert reuse["hit_rate"] == round(reuse["reused_tokens"] / 4800, 6)
    assert "reuse" not in replayed(capsys, *args)


def test_replay_with_reuse_in_a_small_pool(capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    line = '{"timestamp": 0, "input_length": 600, "output_length": 300, "hash_ids": [%d, %d]}\n'
    trace.write_text("".join(line % (i % 3, 10 + i % 5) for i in range(12)))
    args = ["--batch", "4", "--page-tokens", "16", "--chunk", "256", "--capacity", "912", "--reuse", "--kept-window-pages", "9"]
    plan = plan_memory(
        replace(
            load_engine_config(TINY, max_batch_size=4, max_kv_cache_capacity=912, page_tokens=16, max_batch_tokens=260),
            kept_window_pages=9,
        )
    )
    less = plan.groups[0].page_nbytes * 100
    found = replayed(capsys, config, str(trace), *args, "--memory", str(plan.nbytes - less), "--audit-every", "1")
    assert found["preemptions"] > 0
    assert found["reuse"]["evictions"]["blocks"] > 0
    assert found["reuse"]["reused_tokens"] > 0
    assert found["tokens"]["decode"] == 3600
    assert found["groups"][0]["peak_pages"] <= found["groups"][0]["bound_pages"]
    assert "host" not in found["reuse"]
    args += ["--memory", str(plan.nbytes - less), "--audit-every", "5", "--host-memory", "8MiB"]
    tiered = replayed(capsys, config, str(trace), *args)["reuse"]
    assert tiered["host"]["reused_tokens"] > 0
    assert tiered["reused_tokens"] > found["reuse"]["reused_tokens"]
    assert tiered["host"]["moved"]["bytes_out"] > 0 < tiered["host"]["moved"]["bytes_in"]


def test_reuse_wants_ids_of_blocks(capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path) -> None:
    assert "hash_ids" in refused(capsys, "replay", config, "generated", "--reuse")
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}')
    line = refused(capsys, "replay", config, str(path), "--reuse")
    assert "line 1: 1 hash_ids for a prompt of 600 tokens, 2 are wanted" in line
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}')
    assert "cannot stand for tokens" in refused(capsys, "replay", config, str(path), "--reuse")
