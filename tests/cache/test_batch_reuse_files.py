"""Kept prefixes that survive a restart: files that are right, of another model, damaged, or cannot be written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import numba_kv as kv
from numba_kv.ledger.reuse.content import MediaSpan
from numba_kv.ledger.reuse.policy import PublishPolicy
from tests.helpers.batches import everything, same
from tests.helpers.kv_model import opened_io
from tests.helpers.models import chunked, tiny_config
from tests.helpers.reuse_model import ReuseModel
from tests.helpers.states import mamba2, recurrent_config

LIMITS = {"max_batch_size": 3, "lookahead_pages": 0, "max_batch_tokens": 64, "kv_cache_dtype": "float32"}
CONFIG = tiny_config(None, heads=(2, 4), num_kv_pages=40, **LIMITS)
WINDOWS = tiny_config(None, 6, chunked(8), heads=(1, 4), num_kv_pages=40, kept_window_pages=30, **LIMITS)
FLOATS = {"recurrent_state_dtype": "float32", "conv_state_dtype": "float32"}
STATES = recurrent_config(mamba2(**FLOATS), types=("both", "recurrent"), num_kv_pages=40, kept_states=30, **LIMITS)
ALONE = recurrent_config(mamba2(**FLOATS), types=("recurrent",), kept_states=30, **LIMITS)
POLICY = PublishPolicy(every_blocks=2, tails=True)
SYSTEM = [7 * i % 50 for i in range(22)]
PROMPTS = [[*SYSTEM, 1, 2, 3], [*SYSTEM, 4, 5, 6, 7, 8, 9], [*SYSTEM[:9], 60, 61], list(range(30))]


@contextmanager
def model_of(config: kv.LLMEngineConfig = CONFIG, **options: Any) -> Iterator[ReuseModel]:
    with opened_io(config, reuse=kv.ReuseOptions(**{"weights": b"w" * 16, "policy": POLICY, **options})) as (batch, io):
        yield ReuseModel(batch, io)


def serve(model: ReuseModel, tokens: list[int], salt: bytes | None = None) -> int:
    """Compute a prompt, compare all that it reads, and let it go; return how much was reused."""
    sequence = model.admit(tokens, salt=salt)
    reused = sequence.reused_tokens
    while sequence.pending_tokens:
        model.step({sequence: model.batch.prefill_chunk(sequence)})
    model.check_all()
    model.retire(sequence)
    return reused


@pytest.mark.parametrize("host", [(0, 0), (0, 1 << 18), (1 << 18, 0)])
@pytest.mark.parametrize("config", [CONFIG, WINDOWS, STATES, ALONE], ids=["full", "windows", "states", "alone"])
def test_what_is_saved_is_there_after_a_restart(
    config: kv.LLMEngineConfig, host: tuple[int, int], tmp_path: Path, target: str
) -> None:
    path, prompts = tmp_path / "prefixes.safetensors", PROMPTS[3:] if target == "sim" else PROMPTS
    with kv.SharedResources.create_for_llm(config) as first:
        batch = kv.Batch(first, reuse=kv.ReuseOptions(weights=b"w" * 16, policy=POLICY, host_bytes=host[0]))
        model = ReuseModel(batch, kv.KVIO(first.cache_managers[0]) if config.layers else None)
        for prompt in prompts:
            serve(model, prompt)
        serve(model, prompts[0], salt=b"tenant")
        expected = [batch.reuse.cache.lookup(*key).reused_tokens for key in keys(batch, prompts)]
        assert batch.save_prefixes(path) > 2 * len(prompts)
        values, marks = model.values, model.marks
    with kv.SharedResources.create_for_llm(replace(config, max_batch_size=2)) as second:
        batch = kv.Batch(second, reuse=kv.ReuseOptions(weights=b"w" * 16, policy=POLICY, host_bytes=host[1]))
        model = ReuseModel(batch, kv.KVIO(second.cache_managers[0]) if config.layers else None)
        model.values, model.marks = values, marks
        assert batch.load_prefixes(path) > 2 * len(prompts)
        batch.audit()
        if not host[1]:
            assert [batch.reuse.cache.lookup(*key).reused_tokens for key in keys(batch, prompts)] == expected
        found = [serve(model, prompt) for prompt in prompts]
        assert all(mine >= its for mine, its in zip(found, expected[:-1], strict=True))  # each leaves something to the next
        assert found[-1] == expected[-2] > 0
        assert serve(model, prompts[0], salt=b"tenant") == expected[-1]
        assert serve(model, prompts[0], salt=b"other") == 0


def keys(batch: kv.Batch, prompts: list[list[int]]) -> list[Any]:
    """Return identity and content of every prompt, and of the first one of a tenant."""
    told = [*(kv.Prompt(prompt) for prompt in prompts), kv.Prompt(prompts[0], salt=b"tenant")]
    engine = batch.reuse._engine
    return [(replace(engine, salt=prompt.salt), batch.reuse.read(prompt)[1]) for prompt in told]


def test_media_and_adapters_are_saved_too(tmp_path: Path) -> None:
    path = tmp_path / "media.safetensors"
    spans = [MediaSpan(2, 9, b"x" * 16), MediaSpan(11, 3, b"y" * 20)]
    prompt, other = list(range(20)), [*range(15), 50, 51, 52, 53]
    with model_of() as model:
        for tokens in (prompt, other):
            sequence = model.batch.admit(tokens, media=spans)
            model.batch.step({sequence: sequence.pending_tokens})
            model.batch.retire(sequence)
        model.batch.save_prefixes(path)
    with model_of() as model:
        model.batch.load_prefixes(path)
        assert model.batch.admit(prompt).reused_tokens == 2
        assert model.batch.admit(prompt, media=spans).reused_tokens == 19
        assert model.batch.admit(other, media=spans).reused_tokens == 18
        model.batch.audit()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "prefixes.safetensors"
    with model_of() as model:
        for prompt in PROMPTS:
            serve(model, prompt)
        model.batch.save_prefixes(path)
    return path


def refused(path: Path, error: type[Exception], words: str, config: kv.LLMEngineConfig = CONFIG, **options: Any) -> None:
    """Check that a file is refused and nothing is changed."""
    with model_of(config, **options) as model:
        serve(model, PROMPTS[1])
        before, picture = everything(model.batch), [run.tokens.tobytes() for run in model.batch.reuse.cache.store.tree.runs()]
        with pytest.raises(error, match=words):
            model.batch.load_prefixes(path)
        same(everything(model.batch), before)
        assert [run.tokens.tobytes() for run in model.batch.reuse.cache.store.tree.runs()] == picture


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (CONFIG, {"weights": b"v" * 16}, "model differ"),
        (CONFIG, {"scales": b"s"}, "scales differ"),
        (replace(CONFIG, kv_cache_dtype="bfloat16"), {}, "kv_cache_dtype"),
        (replace(CONFIG, page_tokens=8), {}, "page_tokens"),
        (tiny_config(None, heads=(4, 2), num_kv_pages=40, **LIMITS), {}, "model differ"),
        (WINDOWS, {}, "layout of pages differ"),
        (replace(CONFIG, kv_layout="HND"), {}, "layout of pages differ"),
        (replace(CONFIG, kv_layout="HND"), {"host_bytes": 1 << 18}, "layout of pages differ"),
    ],
)
def test_files_of_another_model_are_refused(
    saved: Path, config: kv.LLMEngineConfig, options: dict[str, Any], words: str
) -> None:
    with kv.SharedResources.create_for_llm(config) as resources:
        batch = kv.Batch(resources, reuse=kv.ReuseOptions(**{"weights": b"w" * 16, **options}))
        with pytest.raises(kv.InputError, match=words):
            batch.load_prefixes(saved)
        assert batch.reuse.cache.num_blocks == 0


def test_damaged_files_are_refused(saved: Path) -> None:
    raw = bytearray(saved.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    for at in (20, start, (start + len(raw)) // 2, len(raw) - 1):
        raw[at] ^= 4
        saved.write_bytes(raw)
        with pytest.raises(kv.WeightError), model_of() as model:
            model.batch.load_prefixes(saved)
        raw[at] ^= 4
    saved.write_bytes(raw[: len(raw) // 2])
    refused(saved, kv.WeightError, "truncated")
    saved.write_bytes(b"")
    refused(saved, kv.WeightError, "not a safetensors file")
    saved.unlink()
    refused(saved, kv.WeightError, "cannot be opened")


def test_other_files_are_refused(saved: Path) -> None:
    save_file({"embed": np.ones((4, 4), np.float32)}, saved)
    refused(saved, kv.WeightError, "no file of kept prefixes")


def forged(saved: Path, **changes: Any) -> None:
    """Write the file again with other tensors, and a digest that fits them."""
    from numba_kv.context import prefix_file

    with safe_open(saved, "np") as file:
        metadata = dict(file.metadata())
    tensors = {**load_file(saved), **changes}
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items() if value is not None}
    del metadata["digest"]
    metadata["digest"] = prefix_file._digest(metadata, tensors)
    save_file(tensors, saved, metadata)


@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        ("runs", (0, 0), 9, "owners"),
        ("runs", (0, 1), 2, "runs"),
        ("runs", (1, 2), 99, "places"),
        ("runs", (0, 3), 1, "tokens"),
        ("lines", (0, 0), -1, "pages"),
        ("lines", (0, 0), 1, "rows of line 0"),
        ("lines", (0, 0), 999, "rows of line 0"),
        ("tokens", (0, 0), -5, "tokens"),
        ("tails", (0, 1), 99, "tails"),
        ("tails", (0, 2), 99, "places"),
        ("tails", (0, 4), 0, "rows of snapshots"),
        ("key_ends", (0,), 10**6, "keys do not end"),
        ("media", (0,), 1, "cannot be read"),
        ("states", None, None, "are missing"),
        ("tokens", None, np.zeros((3, 4), np.int64), "another type"),
        ("pages.0", None, np.zeros((2, 3), np.uint8), "rows of line 0"),
    ],
)
def test_files_that_contradict_themselves_are_refused(saved: Path, name: str, place: Any, value: Any, words: str) -> None:
    changed = value
    if place is not None:
        changed = load_file(saved)[name]
        changed[place] = value
    forged(saved, **{name: changed})
    refused(saved, kv.WeightError, words)


def test_a_save_takes_the_place_of_a_file_whole_or_not_at_all(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    with model_of() as model:
        serve(model, PROMPTS[3])

        def fails(*args: Any) -> None:
            raise OSError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fails)
            with pytest.raises(kv.InputError, match="the disk is full"):
                model.batch.save_prefixes(saved)
        assert saved.read_bytes() == before
        assert list(saved.parent.iterdir()) == [saved]
        with pytest.raises(kv.InputError, match="cannot be written"):
            model.batch.save_prefixes(saved.parent / "nowhere" / "file")
        assert model.batch.save_prefixes(saved) == 7
        assert saved.read_bytes() != before
        model.batch.load_prefixes(saved)
        model.check_all()


def test_a_file_needs_a_digest_of_the_weights(saved: Path) -> None:
    with model_of(weights=b"") as model:
        for call in (model.batch.save_prefixes, model.batch.load_prefixes):
            with pytest.raises(kv.InputError, match="a digest of them"):
                call(saved)
    with kv.SharedResources.create_for_llm(CONFIG) as resources, pytest.raises(kv.InputError, match="without reuse"):
        kv.Batch(resources).save_prefixes(saved)


def test_files_of_float8_need_a_digest_of_the_scales(tmp_path: Path) -> None:
    path, config = (
        tmp_path / "prefixes.safetensors",
        tiny_config(None, heads=(1, 8), **{**LIMITS, "kv_cache_dtype": "float8_e4m3"}),
    )
    for scales in (None, b""):
        with kv.SharedResources.create_for_llm(config) as resources:
            batch = kv.Batch(resources, reuse=kv.ReuseOptions(weights=b"w", scales=scales))
            for call in (batch.save_prefixes, batch.load_prefixes):
                with pytest.raises(kv.InputError, match=r"ReuseOptions\(scales=\.\.\.\)"):
                    call(path)
    assert not path.exists()
    for scales in (b"one", b"two"):
        with kv.SharedResources.create_for_llm(config) as resources:
            batch = kv.Batch(resources, reuse=kv.ReuseOptions(weights=b"w", scales=scales))
            if scales == b"one":
                batch.save_prefixes(path)
                assert batch.load_prefixes(path) == 0
            else:
                with pytest.raises(kv.InputError, match="scales differ"):
                    batch.load_prefixes(path)


def test_only_regular_files_are_replaced(saved: Path, tmp_path: Path) -> None:
    before, folder = saved.read_bytes(), tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to pipe").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    with model_of() as model:
        serve(model, PROMPTS[3])
        for name in ("folder", "pipe", "to pipe", "loop"):
            with pytest.raises(kv.InputError, match="not a regular file"):
                model.batch.save_prefixes(tmp_path / name)
        for wrong in (None, 5, True, b"x", ["a"]):
            with pytest.raises(kv.InputError, match="is not a path"):
                model.batch.save_prefixes(wrong)  # type: ignore[arg-type]
        for name in ("a\0b", "n" * 300):
            with pytest.raises(kv.InputError, match="cannot be written"):
                model.batch.save_prefixes(tmp_path / name)
        assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
        link, dangling = folder / "link", folder / "dangling"
        link.symlink_to(saved)
        dangling.symlink_to("new")
        assert model.batch.save_prefixes(link) == model.batch.save_prefixes(dangling) == 7
    assert link.is_symlink()
    assert dangling.is_symlink()
    assert saved.read_bytes() != before
    assert {path.name for path in folder.iterdir()} == {"link", "dangling", "new"}
    with model_of() as model:
        assert model.batch.load_prefixes(folder / "new") == model.batch.load_prefixes(link) == 7


@pytest.mark.parametrize("host", [0, 6000])
def test_what_has_no_room_is_left_out(saved: Path, host: int) -> None:
    with model_of(replace(CONFIG, num_kv_pages=16), host_bytes=host) as model:
        other = model.batch.admit(num_tokens=20)
        model.batch.step({other: 20})
        assert 0 < model.batch.load_prefixes(saved) <= 16
        model.batch.audit()
        model.batch.retire(other)
        assert sum(model.batch.reuse.cache.bring_back(*key) for key in keys(model.batch, PROMPTS)) > 0 or not host
        assert sum(model.batch.reuse.cache.lookup(*key).reused_tokens for key in keys(model.batch, PROMPTS)) > 0
        model.batch.audit()


def test_a_load_without_host_memory_changes_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(nbytes: int) -> Any:
        raise kv.CapacityError("host memory: none", needed=nbytes, free=0)

    with model_of() as model:
        serve(model, PROMPTS[1])
        blocks = model.batch.reuse.cache.num_blocks
        with monkeypatch.context() as patch:
            patch.setattr(model.batch.resources.device, "allocate_staging", fails)
            for call in (model.batch.load_prefixes, model.batch.save_prefixes):
                with pytest.raises(kv.CapacityError):
                    call(saved)
        assert model.batch.reuse.cache.num_blocks == blocks
        assert model.batch.load_prefixes(saved) > blocks
        model.check_all()


def test_nothing_can_be_saved_and_loaded_too(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    with model_of() as model:
        assert model.batch.save_prefixes(path) == 0
        assert model.batch.load_prefixes(path) == 0
        sequence = model.batch.admit(list(range(9)), policy=PublishPolicy())  # leaves no tail
        model.batch.step({sequence: 9})
        assert model.batch.save_prefixes(path) == 2
        assert model.batch.load_prefixes(path) == 2
