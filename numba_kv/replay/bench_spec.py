"""``numba-kv bench spec``: what a speculative round costs beside the models, and how fast accepted states are committed.

A round is k steps of the draft, a verification step of the base, and the commit that takes back what was not accepted, in both.
Bytes of a commit are counted as those that have to move: what is read once and what is written once. Does not know what a good
figure is.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from numba_kv.batch import RoundSteps, SpeculativeBatch
from numba_kv.config import (
    AttentionLayer,
    DeploymentConfig,
    GatedDeltaNetLayer,
    LLMEngineConfig,
    Mamba2Layer,
    SpecDecodeConfig,
)
from numba_kv.config.state_layout import RESIDENT_STATES
from numba_kv.dtypes import dtype
from numba_kv.errors import CapacityError
from numba_kv.geometry import FULL, Window
from numba_kv.replay.bench_kv import plain_copy_us, stream_us
from numba_kv.replay.bench_step import median_us
from numba_kv.shared_resources import SharedResources

if TYPE_CHECKING:
    from numba_kv.cache.mamba_cache import MambaCacheManager
    from numba_kv.config import RecurrentLayer
    from numba_kv.device import Tensor

__all__ = ["SpecSizes", "measure_spec"]

#: Rounds of one graph, launches that are timed, and those before them.
_ROUNDS, _LAUNCHES, _WARM_UP = 20, 9, 3
#: Rounds that are timed call by call.
_CALLS = 60


@dataclass(frozen=True, kw_only=True)
class SpecSizes:
    """What is measured.

    Attributes
    ----------
    rows : int
        Sequences.
    context : int
        Tokens of each.
    drafts : tuple of int
        Steps of the draft in a round.
    layers : int
        Recurrent layers whose states are committed.
    heads : int
        Heads of a state of 64 x 128 (Mamba-2) and, a quarter as many, of 128 x 128 (gated delta net).
    verify_tokens, accepted_tokens : int
        Tokens of a verification step, and those that every row accepts.
    """

    rows: int = 64
    context: int = 4096
    drafts: tuple[int, ...] = (1, 2, 3, 4, 7)
    layers: int = 48
    heads: int = 128
    verify_tokens: int = 4
    accepted_tokens: int = 3


def measure_spec(target: str | None) -> dict[str, object]:
    """Measure rounds of several lengths, and commits of snapshots and replays; microseconds, medians."""
    from numba_kv.device import resolve_target

    on_gpu = resolve_target(target) == "cuda"
    sizes = SpecSizes() if on_gpu else SpecSizes(drafts=(1, 3), layers=1, heads=8)
    found: dict[str, object] = {"target": resolve_target(target), "rows": sizes.rows, "context": sizes.context}
    points = [_measure_rounds(target, sizes, steps) for steps in sizes.drafts]
    kinds = {
        "mamba-2": Mamba2Layer(
            num_heads=sizes.heads,
            head_dim=64,
            state_size=128,
            num_groups=8,
            conv_dim=64 * sizes.heads + 2048,
            conv_kernel=4,
            recurrent_state_dtype="bfloat16",
            conv_state_dtype="bfloat16",
        ),
        "gated delta net": GatedDeltaNetLayer(
            num_heads=sizes.heads // 4,
            num_key_heads=sizes.heads // 8,
            head_dim=128,
            state_size=128,
            conv_dim=64 * sizes.heads,
            conv_kernel=4,
            recurrent_state_dtype="float32",
            conv_state_dtype="bfloat16",
        ),
    }
    for name, layer in kinds.items():
        points += [_measure_what_fits(target, sizes, name, layer, mode) for mode in ("snapshot", "replay")]
    return found | {"points": points}


# -- rounds --------------------------------------------------------------------------------------------------------------


def _measure_rounds(target: str | None, sizes: SpecSizes, steps: int) -> dict[str, object]:
    """Time rounds of `steps` drafts: call by call on the host, and inside a graph."""
    import numpy as np

    with SharedResources.create_for_spec_decode(_deployment(sizes, steps), target=target) as resources:
        device = resources.device
        with SpeculativeBatch(resources) as batch, device.active():
            sequences = batch.update(admit=[sizes.context] * sizes.rows)
            for sequence in sequences:
                batch.step({sequence: sizes.context})
            accepted = device.tensor((sizes.rows,), dtype("int32"))
            accepted.fill_from(np.random.default_rng(0).integers(1, steps + 2, sizes.rows).astype(np.int32))
            found: dict[str, object] = {"what": f"round, {steps} drafts", "host_us": _round_us(batch, accepted, steps)}
            plain = RoundSteps(verify_tokens=steps + 1, draft_steps=steps)
            found |= _captured_round(batch, accepted, plain)
            found["captured_commit_us"] = _idle_commit_us(batch, accepted)
            batch.sync_lengths()
            batch.audit()
            return {name: value for name, value in found.items() if value is not None}


def _deployment(sizes: SpecSizes, steps: int) -> DeploymentConfig:
    """Return a base of a full and a window layer, and a draft of one full layer, with room for every round that is run."""
    rounds = _CALLS + 10 + 2 * (_LAUNCHES + _WARM_UP) * _ROUNDS
    capacity = sizes.context + (steps + 1) * rounds
    layers = tuple(AttentionLayer(num_kv_heads=1, head_dim=8, window=w) for w in (FULL, Window("sliding", 1024)))
    base = LLMEngineConfig(
        layers=layers,
        max_batch_size=sizes.rows,
        max_kv_cache_capacity=capacity,
        lookahead_pages=16,
        hidden_size=64,
        vocab_size=1000,
    )
    draft = LLMEngineConfig(
        layers=layers[:1],
        max_batch_size=sizes.rows,
        max_kv_cache_capacity=capacity + steps,
        lookahead_pages=16,
        hidden_size=64,
        vocab_size=1000,
    )
    spec = SpecDecodeConfig(mode="mtp", steps=steps, has_reference_limits=False)
    return DeploymentConfig(base=base, draft=draft, spec=spec)


def _round_us(batch: SpeculativeBatch, accepted: Tensor, steps: int) -> float:
    """Host time of a round's calls, by counts on the device; lengths are read now and then, outside of the time."""
    times = []
    for i in range(_CALLS):
        start = time.perf_counter()
        for _ in range(steps):
            batch.draft_step(1)
        batch.verify_step()
        batch.commit(accepted)
        times.append(time.perf_counter() - start)
        if i % 10 == 9:
            batch.sync_lengths()
    return round(statistics.median(times[5:]) * 1e6, 2)


def _captured_round(batch: SpeculativeBatch, accepted: Tensor, steps: RoundSteps) -> dict[str, float | None]:
    """Host time and GPU time of a round in a graph of many."""
    stream = batch.resources.stream
    graph = batch.capture(accepted, rounds=_ROUNDS, steps=steps)
    host, device = [], []
    for _ in range(_WARM_UP + _LAUNCHES):
        graph.reserve(_ROUNDS)
        stream.synchronize()
        begin = stream.record(timing=True)
        start = time.perf_counter()
        graph.launch()
        host.append((time.perf_counter() - start) * 1e6 / _ROUNDS)
        device.append(stream.record(timing=True).microseconds_since(begin) / _ROUNDS)
        graph.advanced()
        batch.sync_lengths()
    graph.close()
    on_gpu = batch.resources.device.target == "cuda"
    return {
        "captured_host_us": round(statistics.median(host[_WARM_UP:]), 3),
        "captured_us": round(statistics.median(device[_WARM_UP:]), 3) if on_gpu else None,
    }


def _idle_commit_us(batch: SpeculativeBatch, accepted: Tensor) -> float | None:
    """Return the GPU time of a commit in a graph, of rows that verified nothing."""
    device = batch.resources.device
    if device.target != "cuda":
        return None

    def work(stream: object) -> None:
        for _ in range(_ROUNDS):
            batch.enqueue_commit(stream, accepted)

    graph = device.capture(work)
    us = stream_us(device, lambda: graph.launch(device.stream), inner=1) / _ROUNDS
    graph.close()
    return round(us, 3)


# -- states --------------------------------------------------------------------------------------------------------------


def _measure_what_fits(target: str | None, sizes: SpecSizes, name: str, layer: RecurrentLayer, mode: str) -> dict[str, object]:
    """Measure a commit of as many layers as the device holds: all, or half of them, or half of these."""
    while True:
        try:
            return _measure_commit(target, sizes, name, layer, mode)
        except CapacityError:
            if sizes.layers == 1:
                raise
            sizes = replace(sizes, layers=sizes.layers // 2)


def _measure_commit(target: str | None, sizes: SpecSizes, name: str, layer: RecurrentLayer, mode: str) -> dict[str, object]:
    """Time the commit of every row's accepted states in all layers, beside a copy of as many bytes."""
    import numpy as np

    config = LLMEngineConfig(
        layers=(),
        layer_types=("recurrent",) * sizes.layers,
        recurrent_layer=layer,
        max_batch_size=sizes.rows,
        max_kv_cache_capacity=256,
        max_verify_tokens=sizes.verify_tokens,
        recurrent_spec_verify_mode=mode,
    )
    with SharedResources.create_for_llm(config, target=target) as resources:
        device, states = resources.device, resources.cache_managers[0].mamba_cache
        lengths, slots = (device.tensor((sizes.rows,), dtype("int32")) for _ in range(2))
        lengths.fill_from(np.full(sizes.rows, sizes.accepted_tokens, np.int32))
        slots.fill_from(np.random.default_rng(0).permutation(sizes.rows).astype(np.int32))
        nbytes = _moved(states, sizes)
        with device.active():
            us = stream_us(device, lambda: states.scatter_accepted_linear_states(lengths, slots))
            host = median_us(lambda: states.scatter_accepted_linear_states(lengths, slots), 20)
    copy = plain_copy_us(device, nbytes)
    found: dict[str, object] = {"what": f"{name}, {mode}", "layers": sizes.layers, "host_us": host, "us": round(us, 2)}
    found |= {"nbytes": nbytes, "gb_per_s": round(nbytes / us / 1e3, 1)}
    if copy is not None:
        found |= {"copy_us": round(copy, 2), "of_copy": round(copy / us, 3)}
    return found


def _moved(states: MambaCacheManager, sizes: SpecSizes) -> int:
    """Bytes that a commit reads and writes: the states, from snapshots or in place, and the inputs that are replayed."""
    total = 0
    for name in states.state_names:
        array = states.state(name, 0)
        if name in RESIDENT_STATES:
            total += 2 * math.prod(array.shape[1:]) * array.dtype.itemsize
        elif name.startswith("replay_"):
            total += sizes.accepted_tokens * math.prod(array.shape[2:]) * array.dtype.itemsize
    return total * sizes.rows * sizes.layers
