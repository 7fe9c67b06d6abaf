"""Adapters of our own making, in both layouts, for a small engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from numba_kv.device import Device, Memory
from numba_kv.weights import LoRAManager, LoRATarget

Q, K, V, OUT = (f"model.layers.0.self_attn.{name}_proj" for name in "qkvo")
#: Module -> (k, n).
SIZES = {Q: (12, 16), K: (12, 8), V: (12, 8), OUT: (16, 12)}
TARGETS = tuple(LoRATarget(name=name, k=k, n=n) for name, (k, n) in SIZES.items())
QKV = "model.layers.0.self_attn.qkv_proj"
FUSED_TARGETS = (
    LoRATarget(name=QKV, k=12, n=32, parts=(("q_proj", 16), ("k_proj", 8), ("v_proj", 8))),
    LoRATarget(name=OUT, k=16, n=12),
)
Pairs = dict[str, tuple[NDArray[Any], NDArray[Any]]]


def pairs(*modules: str, rank: int = 4, seed: int = 0, dtype: Any = np.float32) -> Pairs:
    """Return A [k, r] and B [r, n] of some modules, of small numbers that every type holds exactly."""
    random = np.random.default_rng(seed)

    def small(shape: tuple[int, int]) -> NDArray[Any]:
        return (random.integers(-15, 16, shape) / 8).astype(dtype)

    return {name: (small((SIZES[name][0], rank)), small((rank, SIZES[name][1]))) for name in modules}


def reference(pairs: Pairs) -> dict[str, NDArray[Any]]:
    """Return the tensors of the reference layout."""
    halves = {f"{name}.lora_A.weight": a for name, (a, _) in pairs.items()}
    return halves | {f"{name}.lora_B.weight": b for name, (_, b) in pairs.items()}


def peft(pairs: Pairs) -> dict[str, NDArray[Any]]:
    """Return the tensors of PEFT's layout."""
    turned = {f"base_model.model.{name}": array.T.copy() for name, array in reference(pairs).items()}
    return dict(sorted(turned.items()))


def save(path: Path, tensors: Mapping[str, NDArray[Any]]) -> Path:
    """Write a safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(dict(tensors), path)
    return path


def save_peft(folder: Path, tensors: Mapping[str, NDArray[Any]], **config: Any) -> Path:
    """Write PEFT's folder; a value of `config` that is `...` leaves its key out."""
    save(folder / "adapter_model.safetensors", tensors)
    written = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        **config,
    }
    text = json.dumps({key: value for key, value in written.items() if value is not ...})
    (folder / "adapter_config.json").write_text(text)
    return folder


def manager(device: Device, targets: tuple[LoRATarget, ...] = TARGETS, **options: Any) -> LoRAManager:
    """Return a manager for 4 rows, 2 adapters of rank 8, float32."""

    def take(name: str, nbytes: int) -> Memory:
        return device.allocate(nbytes)

    settings = {"max_rank": 8, "max_adapters": 2, "dtype": "float32", "max_batch_size": 4, **options}
    return LoRAManager(device, take, targets, **settings)


def slot(lora: LoRAManager, number: int, target: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return A and B of a slot as float32."""
    return tuple(tensor[number].to_host().astype(np.float32) for tensor in (lora.tensors.a(target), lora.tensors.b(target)))  # type: ignore[return-value]


def padded(pair: tuple[NDArray[Any], NDArray[Any]], rank: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return A and B with zeros up to `rank`."""
    a, b = pair
    more = rank - b.shape[0]
    return np.pad(a, ((0, 0), (0, more))), np.pad(b, ((0, more), (0, 0)))
