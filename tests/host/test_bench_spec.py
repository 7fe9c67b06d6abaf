"""``numba-kv bench spec`` measures what it says: the bytes of a commit, and as many layers as the device holds."""

from __future__ import annotations

from typing import Any

import pytest

from numba_kv.config import GatedDeltaNetLayer, LLMEngineConfig, Mamba2Layer
from numba_kv.errors import CapacityError
from numba_kv.replay import bench_spec
from numba_kv.replay.bench_spec import SpecSizes
from numba_kv.shared_resources import SharedResources

SIZES = SpecSizes(rows=2, context=40, drafts=(1,), layers=3, verify_tokens=4, accepted_tokens=3)
MAMBA = Mamba2Layer(
    num_heads=4, head_dim=8, state_size=16, num_groups=2, conv_dim=5, conv_kernel=4, recurrent_state_dtype="bfloat16"
)
NET = GatedDeltaNetLayer(num_heads=4, num_key_heads=2, head_dim=8, state_size=16, conv_dim=5, conv_kernel=4)


@pytest.mark.parametrize(
    ("layer", "mode", "nbytes"),
    [
        # a state of 512 numbers, a convolution of 20, each read and written
        (MAMBA, "snapshot", 2 * (512 * 2 + 20 * 2)),
        # and of three tokens: dA and dt of 4 heads, x of 32 channels, B of 32 numbers
        (MAMBA, "replay", 2 * (512 * 2 + 20 * 2) + 3 * 4 * (4 + 4 + 32 + 32)),
        # a float32 state; decay and gate of 4 heads, keys of 16 numbers, and values of 64 in float16
        (NET, "replay", 2 * (512 * 4 + 20 * 2) + 3 * (4 * (4 + 4 + 16) + 2 * 64)),
    ],
)
def test_the_bytes_of_a_commit(layer: Any, mode: str, nbytes: int) -> None:
    config = LLMEngineConfig(
        layers=(), layer_types=("recurrent",) * 3, recurrent_layer=layer, max_batch_size=2, max_kv_cache_capacity=64,
        max_verify_tokens=4, recurrent_spec_verify_mode=mode,
    )  # fmt: skip
    with SharedResources.create_for_llm(config) as resources:
        assert bench_spec._moved(resources.cache_managers[0].mamba_cache, SIZES) == 2 * 3 * nbytes


def test_half_the_layers_where_all_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(target: Any, sizes: SpecSizes, *rest: Any) -> dict[str, object]:
        asked.append(sizes.layers)
        if sizes.layers > 12:
            raise CapacityError("no memory", needed=1, free=0)
        return {"layers": sizes.layers}

    monkeypatch.setattr(bench_spec, "_measure_commit", measure)
    assert bench_spec._measure_what_fits(None, SpecSizes(), "mamba-2", MAMBA, "replay") == {"layers": 12}
    assert asked == [48, 24, 12]
    monkeypatch.setattr(bench_spec, "_measure_commit", lambda *rest: measure(None, SpecSizes()))
    with pytest.raises(CapacityError):
        bench_spec._measure_what_fits(None, SpecSizes(layers=1), "mamba-2", MAMBA, "replay")


def test_rounds_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("_ROUNDS", 2), ("_LAUNCHES", 2), ("_WARM_UP", 1), ("_CALLS", 11)):
        monkeypatch.setattr(bench_spec, name, number)
    found = bench_spec._measure_rounds(None, SIZES, 1)
    assert found["what"] == "round, 1 drafts"
    assert all(isinstance(value, float) and value > 0 for name, value in found.items() if name != "what")
