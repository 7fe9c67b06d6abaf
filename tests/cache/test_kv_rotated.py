"""KVIO.write_rotated over a real batch: what it writes is what rotating by hand and `write` would."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kv.cache.kv_rotation import HeadNorm
from numba_kv.errors import InputError, InteropError, ShapeError, StateError
from tests.helpers.kv_model import opened_io, uploaded
from tests.helpers.kv_pools import converted, numbers, same_bits
from tests.helpers.kv_rotations import normalised, turned, unit_order
from tests.helpers.models import tiny_config


def table_of(rows: int, rotary: int) -> np.ndarray:
    return np.random.default_rng(1).uniform(-1, 1, (1, rows, rotary)).astype(np.float32)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3"])
def test_a_step_is_rotated_and_written(kind: str, interleaved: bool) -> None:
    config = tiny_config(None, 6, heads=(2, 16), page_tokens=4, max_batch_tokens=96, kv_cache_dtype=kind)
    with opened_io(config) as (batch, io):
        first, second = batch.admit(num_tokens=9), batch.admit(num_tokens=3)
        values = table_of(64, 16)
        table = uploaded(io, values)
        weight = uploaded(io, numbers(np.random.default_rng(2), (16,), "bfloat16"))
        norm = HeadNorm(q=weight, k=weight, eps=1e-5, offset=1.0)
        if kind == "float8_e4m3":
            for layer in range(2):
                io.set_scales(layer, 0.5, [0.25, 2.0])
        for counts in ({first: 9, second: 3}, {first: 1, second: 1}):
            view = batch.step(counts)
            tokens = view.num_tokens
            rows = values[0, view.positions.to_host()[:tokens]]
            for layer in range(2):
                given = numbers(np.random.default_rng(layer + tokens), (tokens + 2, 7, 16), "bfloat16")
                packed, out = uploaded(io, given), uploaded(io, np.zeros_like(given[:, :2]))
                q, k, v = packed[:, :3], packed[:, 3:5], packed[:, 5:]
                for _ in range(2):  # bound once
                    packed.fill_from(given)
                    io.write_rotated(layer, q, k, v, view, table, interleaved=interleaved, k_out=out, norm=norm)
                expected = {}
                for name, part in (("q", slice(0, 3)), ("k", slice(3, 5))):
                    wide = given[:tokens, part].astype(np.float32)
                    order = unit_order(16, 16, interleaved)
                    expected[name] = turned(
                        normalised(wide, weight.to_host(), 1e-5, 1.0, order), rows, interleaved
                    )
                found = packed.to_host()
                assert same_bits(found[:tokens, :3], converted(expected["q"], "bfloat16"))
                assert same_bits(found[:, 3:], given[:, 3:])
                assert same_bits(found[tokens:], given[tokens:])
                assert same_bits(out.to_host()[:tokens], converted(expected["k"], "bfloat16"))
                pool = batch.resources.cache_managers[0].kv(layer).to_host()
                factors = (np.full(2, 2.0, np.float32), np.array([4.0, 0.5], np.float32))
                halves = (expected["k"], given[:tokens, 5:].astype(np.float32))
                page_tokens = pool.shape[2]
                slots = view.slot_mapping[batch.resources.cache_managers[0].storage(layer).group].to_host()[:tokens]
                assert (slots >= 0).any()
                for token, slot in enumerate(slots.tolist()):
                    if slot >= 0:
                        for half in range(2):
                            factor = factors[half] if kind == "float8_e4m3" else None
                            wanted = converted(halves[half][token], kind, factor)
                            assert same_bits(pool[half, slot // page_tokens, slot % page_tokens], wanted)
        assert len([key for key in io._launches if key[0] == "rotate"]) <= 4


def test_a_layer_that_borrows_rotates_q_alone() -> None:
    config = tiny_config(None, None, heads=(2, 16), donors={1: 0}, kv_cache_dtype="float16")
    with opened_io(config) as (batch, io):
        view = batch.step({batch.admit(num_tokens=3): 3})
        values = table_of(8, 16)
        given = numbers(np.random.default_rng(3), (3, 2, 16), "float32")
        q, out, table = uploaded(io, given), uploaded(io, np.zeros_like(given)), uploaded(io, values)
        io.write_rotated(1, q, None, None, view, table, q_out=out)
        assert same_bits(q.to_host(), given)
        assert same_bits(out.to_host(), turned(given, values[0, :3], False))
        pool = batch.resources.cache_managers[0].kv(0)
        assert not pool.to_host().any()
        with pytest.raises(InputError, match="layer: 1 borrows"):
            io.write_rotated(1, q, q, q, view, table)
        with pytest.raises(InputError, match="layer 0 has K and V of its own"):
            io.write_rotated(0, q, None, None, view, table)


def test_bad_input_changes_nothing() -> None:
    config = tiny_config(None, heads=(2, 16), kv_cache_dtype="float8_e4m3")
    with opened_io(config) as (batch, io):
        view = batch.step({batch.admit(num_tokens=4): 4})
        given = numbers(np.random.default_rng(4), (4, 6, 16), "bfloat16")
        packed, table = uploaded(io, given), uploaded(io, table_of(8, 16))
        q, k, v = packed[:, :2], packed[:, 2:4], packed[:, 4:]
        with pytest.raises(StateError, match="has no scales"):
            io.write_rotated(0, q, k, v, view, table)
        io.set_scales(0, 1.0, 1.0)
        for arguments, options, message in (
            ((q, k, v, None, table), {}, "view: "),
            ((q, k, v, view, k), {}, "table: "),
            ((q, k, None, view, table), {}, "k, v: one of them"),
            ((q[:3], k[:3], v[:3], view, table), {}, "3 tokens given, 4 wanted"),
            ((q, k, v, view, table), {"positions": uploaded(io, np.zeros(3, np.int32))}, "3 tokens given, 4 wanted"),
            ((q, k, v, view, table), {"norm": 1e-6}, "norm: float is not a HeadNorm"),
            ((q, k, v, view, table), {"q_out": k}, "q_out: lies in the range of k"),
            ((q, k, v, view, table), {"norm": HeadNorm(q=table)}, "norm.q: "),
        ):
            with pytest.raises((InputError, ShapeError, InteropError), match=message):
                io.write_rotated(0, *arguments, **options)
        assert same_bits(packed.to_host(), given)
        assert not batch.resources.cache_managers[0].kv(0).to_host().astype(np.float32).any()
    with pytest.raises(StateError, match="closed"):
        io.write_rotated(0, q, k, v, view, table)
