"""What a rotary table and a switch of adapters cost.

Knows how to make both. Does not know what a good figure is.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

from numba_kv.config import LoRATarget, RopeConfig
from numba_kv.device import Device, Memory, create_device
from numba_kv.weights import LoRAManager, RopeCache

__all__ = ["measure_lora", "measure_rope"]

_POSITIONS, _CHANNELS = 131072, 128
#: A decoder of 1 billion weights.
_LAYERS, _HIDDEN, _FFN, _KV, _RANK = 16, 2048, 8192, 512, 16


class _Taken(ExitStack):
    """Memory that goes back at the end."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def take(self, name: str, nbytes: int) -> Memory:
        """Return device memory."""
        memory = self._device.allocate(nbytes)
        self.callback(lambda: memory.close(self._device.stream))
        return memory


def measure_rope(target: str | None) -> dict[str, object]:
    """Time the filling of a rotary table of 131,072 positions and 128 channels, float32."""
    device = create_device(target)
    config = RopeConfig(
        rope_type="default", theta=5e5, rotary_dim=_CHANNELS, max_position_embeddings=_POSITIONS, parameters={}
    )
    with device.active(), _Taken(device) as taken:
        cache = RopeCache(device, taken.take)
        taken.callback(cache.close)
        table = cache.table(config, _POSITIONS)
        times = []
        for _ in range(9):
            device.stream.synchronize()
            begin = device.stream.record(timing=True)
            table.fill()
            times.append(device.stream.record(timing=True).microseconds_since(begin))
    us = round(statistics.median(times), 2)
    return {"target": device.target, "positions": _POSITIONS, "channels": _CHANNELS, "fill_us": us}


def measure_lora(target: str | None) -> dict[str, object]:
    """Time the switch of all layers between two adapters, and the assignment of adapters to rows."""
    import numpy as np

    device = create_device(target)
    sizes = {"q_proj": _HIDDEN, "k_proj": _KV, "v_proj": _KV, "o_proj": _HIDDEN, "gate_proj": _FFN, "up_proj": _FFN}
    targets = [LoRATarget(name=f"model.layers.{i}.{name}", k=_HIDDEN, n=n) for i in range(_LAYERS) for name, n in sizes.items()]
    random = np.random.default_rng(0)
    rows = 256
    with device.active(), _Taken(device) as taken:
        lora = LoRAManager(device, taken.take, targets, max_rank=_RANK, max_adapters=2, max_batch_size=rows)
        taken.callback(lora.close)
        for name in ("a", "b"):
            matrices = {}
            for one in targets:
                matrices[one.a_name] = random.standard_normal((one.k, _RANK), np.float32) / 64
                matrices[one.b_name] = random.standard_normal((_RANK, one.n), np.float32) / 64
            lora.load(name, matrices)
        switch, assign, on_device = [], [], []
        for i in range(40):
            device.stream.synchronize()
            begin = device.stream.record(timing=True)
            start = time.perf_counter()
            lora.switch("ab"[i % 2])
            switch.append((time.perf_counter() - start) * 1e6)
            on_device.append(device.stream.record(timing=True).microseconds_since(begin))
            choice = {row: "ab"[(row + i) % 2] for row in range(rows)}
            start = time.perf_counter()
            lora.assign(choice)
            assign.append((time.perf_counter() - start) * 1e6)
    return {
        "target": device.target,
        "layers": _LAYERS,
        "projections": len(targets),
        "rank": _RANK,
        "slot_nbytes": lora.layout.slot_nbytes,
        "switch_host_us": round(statistics.median(switch), 2),
        "switch_us": round(statistics.median(on_device), 2),
        "assign_256_rows_host_us": round(statistics.median(assign), 2),
    }
