"""Wrong adapters: each is refused by name and reason, and changes nothing."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_kv.device import create_device
from numba_kv.errors import InputError, LoRAError, WeightError
from numba_kv.weights import LoRAManager, LoRATarget
from tests.helpers.lora_files import (
    FUSED_TARGETS,
    QKV,
    SIZES,
    TARGETS,
    K,
    Q,
    V,
    manager,
    pairs,
    peft,
    reference,
    save,
    save_peft,
)


@pytest.fixture(scope="module")
def lora() -> Iterator[LoRAManager]:
    device = create_device("cpu")  # refusals are decided on the host
    made = manager(device)
    made.load("good", reference(pairs(Q)))
    made.assign({1: "good"})
    yield made
    made.close()


def file(**changes: Any) -> Callable[[Path], Path]:
    """Return a maker of a file in the reference layout, with tensors changed, added, or (None) left out."""

    def make(folder: Path) -> Path:
        tensors = {**reference(pairs(Q, K)), **changes.get("tensors", {})}
        return save(folder / "bad.safetensors", {name: array for name, array in tensors.items() if array is not None})

    return make


def folder(tensors: dict[str, Any] | None = None, modules: tuple[str, ...] = (Q, K), **config: Any) -> Callable[[Path], Path]:
    """Return a maker of a folder in PEFT's layout."""

    def make(where: Path) -> Path:
        return save_peft(where / "bad", {**peft(pairs(*modules)), **(tensors or {})}, **config)

    return make


def config_text(text: str) -> Callable[[Path], Path]:
    def make(where: Path) -> Path:
        made = folder()(where)
        (made / "adapter_config.json").write_text(text)
        return made

    return make


def then(first: Callable[[Path], Path], change: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def make(where: Path) -> Path:
        made = first(where)
        change(made)
        return made

    return make


def empty_folder(where: Path) -> Path:
    (where / "empty").mkdir()
    return where / "empty"


def loop(where: Path) -> Path:
    (where / "loop.safetensors").symlink_to(where / "loop.safetensors")
    return where / "loop.safetensors"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def without_config(path: Path) -> None:
    (path / "adapter_config.json").unlink()


def float32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


P = "base_model.model."
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
BASE = json.dumps({"r": 4, "target_modules": ["q_proj", "k_proj"]})[:-1]
NAN = float("nan")

#: name -> (what makes it, the message).
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    # where it is
    "missing": (lambda where: where / "nothing.safetensors", "nothing.safetensors: cannot be opened"),
    "an empty folder": (empty_folder, "empty: the folder holds no adapter_model.safetensors and no processed"),
    "a loop of links": (loop, "loop.safetensors: cannot be opened"),
    "truncated": (then(file(), cut), "truncated"),
    "no configuration": (then(folder(), without_config), "adapter_config.json is missing beside it"),
    "a folder named like a file": (lambda w: (w / "x.safetensors").mkdir() or w / "x.safetensors", "the folder holds no"),
    # the file
    "no tensors": (lambda where: save(where / "none.safetensors", {}), "it holds no tensors"),
    "an unknown target": (
        file(tensors={A.replace("q_proj", "z_proj"): float32(12, 4), B.replace("q_proj", "z_proj"): float32(4, 16)}),
        "'model.layers.0.self_attn.z_proj', which is not one of the engine's targets",
    ),
    "a layer too many": (
        file(tensors={A.replace(".0.", ".1."): float32(12, 4), B.replace(".0.", ".1."): float32(4, 16)}),
        "layers.1.self_attn.q_proj', which is not one",
    ),
    "no A": (file(tensors={A: None}), "q_proj.lora_B.weight' has no A"),
    "no B": (file(tensors={B: None}), "q_proj.lora_A.weight' has no B"),
    "a whole weight": (file(tensors={f"{Q}.weight": float32(12, 16)}), "q_proj.weight' is neither lora_A nor lora_B"),
    "a bias": (file(tensors={f"{Q}.lora_B.bias": float32(16)}), "lora_B.bias' is a bias"),
    "a magnitude": (folder({f"{P}{Q}.lora_magnitude_vector.weight": float32(16)}), "a magnitude vector"),
    "an embedding": (folder({f"{P}model.embed_tokens.lora_embedding_A": float32(4, 9)}), "an adapter of the embedding"),
    "A twice": (folder({f"{P}{Q}.lora_A.other.weight": float32(4, 12)}), "are both A of"),
    "fused and split": (
        file(tensors={f"{QKV}.lora_A.weight": float32(12, 4), f"{QKV}.lora_B.weight": float32(4, 32)}),
        "are for the same columns of",
    ),
    # the matrices
    "ranks disagree": (
        file(tensors={B: float32(3, 16)}),
        "lora_A.weight' has rank 4, 'model.layers.0.self_attn.q_proj.lora_B.weight' 3",
    ),
    "too high a rank": (file(tensors={A: float32(12, 9), B: float32(9, 16)}), "has rank 9, at most 8 is allowed"),
    "A for other channels": (file(tensors={A: float32(11, 4)}), "lora_A.weight' takes 11 channels, .* has 12"),
    "B for other channels": (file(tensors={B: float32(4, 15)}), "lora_B.weight' gives 15 channels, .* has 16"),
    "turned": (file(tensors={A: float32(4, 12)}), "has rank 12"),
    "a vector": (file(tensors={A: float32(48)}), r"lora_A.weight' has shape \[48\], a matrix is wanted"),
    "a stack": (file(tensors={A: float32(1, 12, 4)}), r"has shape \[1, 12, 4\]"),
    "rank 0": (file(tensors={A: float32(12, 0), B: float32(0, 16)}), r"has shape \[12, 0\]"),
    "integers": (
        file(tensors={A: np.ones((12, 4), np.int32)}),
        "lora_A.weight' is int32, float32 or float16 or bfloat16 or float64",
    ),
    "NaN": (file(tensors={A: np.full((12, 4), NAN, np.float32)}), "lora_A.weight' holds nan"),
    "infinite": (file(tensors={B: np.full((4, 16), np.inf, np.float32)}), "lora_B.weight' holds inf"),
    # adapter_config.json
    "not JSON": (config_text("{"), "not valid JSON"),
    "a list": (config_text("[]"), "the JSON is list"),
    "a key twice": (config_text('{"r": 4, "r": 5}'), "r appears twice"),
    "NaN scale": (config_text(BASE + ', "lora_alpha": NaN}'), "lora_alpha is nan, a finite number"),
    "infinite scale": (config_text(BASE + ', "lora_alpha": 1e999}'), "lora_alpha is inf"),
    "a scale of text": (folder(lora_alpha="8"), "lora_alpha is '8'"),
    "a scale for one module": (folder(alpha_pattern={"q_proj": NAN}), "alpha_pattern 'q_proj' is nan"),
    "no scale": (folder(lora_alpha=...), "lora_alpha is null"),
    "no rank": (folder(r=...), "r is null"),
    "rank of text": (folder(r="4"), "r is '4'"),
    "rank true": (folder(r=True), "r is true"),
    "another rank": (folder(r=5), "says rank 5 for 'model.layers.0.self_attn.[qk]_proj', .* has 4"),
    "another rank of a module": (folder(rank_pattern={"k_proj": 2}), "says rank 2 for 'model.layers.0.self_attn.k_proj'"),
    "no pattern": (folder(rank_pattern={"k_proj(": 2}), r"rank_pattern has 'k_proj\(', which is no pattern"),
    "patterns in a list": (folder(alpha_pattern=[1]), r"alpha_pattern is \[1\]"),
    "not listed": (folder(target_modules=["q_proj"]), "target_modules does not list 'model.layers.0.self_attn.k_proj'"),
    "modules of numbers": (folder(target_modules=[3]), r"target_modules is \[3\]"),
    "another method": (folder(peft_type="LOHA"), "peft_type is 'LOHA'"),
    "DoRA": (folder(use_dora=True), "use_dora is true: a magnitude vector"),
    "biases": (folder(bias="all"), "bias is 'all'"),
    "whole modules": (folder(modules_to_save=["lm_head"]), "modules_to_save is "),
    "a changed base": (folder(init_lora_weights="pissa_niter_4"), "init_lora_weights is 'pissa_niter_4'"),
    "rslora of text": (folder(use_rslora="yes"), "use_rslora is 'yes'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_adapter_is_refused_and_changes_nothing(lora: LoRAManager, tmp_path: Path, name: str) -> None:
    make, said = BAD[name]
    source = make(tmp_path)
    device = lora._device
    gc.collect()
    before = (dict(lora.adapters), lora.rows, list(lora._slots._free), device.bytes_to_device, device.memory.current_bytes)
    bytes_ = lora.tensors.words.to_host()
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for under in ("good", "new"):
        with pytest.raises(WeightError, match=said) as refusal:
            lora.load(under, source)
        assert str(tmp_path) in str(refusal.value), "the file is named"
        del refusal  # its traceback holds the mapped file
    gc.collect()
    after = (dict(lora.adapters), lora.rows, list(lora._slots._free), device.bytes_to_device, device.memory.current_bytes)
    assert before == after
    assert np.array_equal(bytes_, lora.tensors.words.to_host())
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors, "no file stays open"


def test_the_table_is_long_enough() -> None:
    assert len(BAD) >= 20


def test_names_are_carried(lora: LoRAManager) -> None:
    with pytest.raises(LoRAError) as refusal:
        lora.load("new", {A: float32(12, 4)})
    assert refusal.value.missing == (B,)
    with pytest.raises(LoRAError) as refusal:
        lora.load("new", {A: float32(12, 9), B: float32(9, 16)})
    assert refusal.value.mismatched == (A, B)


@pytest.mark.parametrize("source", [None, 3, b"file", [A], {3: float32(2, 2)}, {A: [[1.0]], B: float32(4, 16)}])
def test_what_is_no_source(lora: LoRAManager, source: Any) -> None:
    with pytest.raises(InputError, match="source: "):
        lora.load("new", source)


def test_tensors_alone_are_not_peft(lora: LoRAManager) -> None:
    with pytest.raises(InputError, match="need its adapter_config.json"):
        lora.load("new", peft(pairs(Q)), layout="peft")


def test_a_target_with_little_room() -> None:
    narrow = LoRATarget(name=QKV, k=12, n=32, parts=FUSED_TARGETS[0].parts, max_rank=6)
    lora = manager(create_device("cpu"), (narrow,))
    with pytest.raises(LoRAError, match="have rank 8 together, target .* has room for 6"):
        lora.load("new", reference(pairs(Q, V, rank=4)))
    with pytest.raises(LoRAError, match="has rank 7, at most 6"):
        lora.load("new", reference(pairs(Q, rank=7)))
    lora.load("new", reference(pairs(Q, V, rank=3)))
    lora.close()


def test_sizes_of_the_helpers_are_those_of_the_targets() -> None:
    assert {t.name: (t.k, t.n) for t in TARGETS} == SIZES
