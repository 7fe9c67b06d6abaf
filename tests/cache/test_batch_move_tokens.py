"""The accepted path of a tree moves together: K and V in all layers, within a row's last step, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.cache import KVIO
from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from tests.helpers.batches import opened
from tests.helpers.kv_model import KVModel, opened_io
from tests.helpers.models import chunked, tiny_config


def on_device(batch: kv.Batch, values: list[list[int]]) -> Tensor:
    tensor = batch.resources.device.tensor((len(values), len(values[0])), dtype("int32"))
    tensor.fill_from(np.array(values, np.int32))
    return tensor


def pools(io: KVIO, layers: int) -> list[np.ndarray]:
    return [io._caches.kv(i).to_host() for i in range(layers)]


@pytest.mark.parametrize("kind", ["float32", "float8_e4m3"])
@pytest.mark.parametrize("page", [1, 2, 16])
def test_an_accepted_path_is_what_the_next_step_sees(page: int, kind: str) -> None:
    """Rows of a tree of 6: a path with gaps, one that is in place, one of the root alone, and one that ends in -1."""
    config = tiny_config(
        None, 6, chunked(8), 6, heads=[(2, 8), (1, 8), (2, 4), (3, 7)], page_tokens=page, max_batch_size=4,
        max_step_tokens=6, max_batch_tokens=96, kv_cache_dtype=kind,
    )  # fmt: skip
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io, kind)
        sequences = batch.update(admit=[11, 3, 7, 5])
        model.step({s: s.pending_tokens for s in sequences})
        for paths in ([[0, 2, 5], [0, 1, 2], [0, -1, -1], [1, 4, -1]], [[3, 4, 5], [2, 3, -1], [0, 3, 5], [5, -1, -1]]):
            model.step(dict.fromkeys(sequences, 6))
            batch.move_tokens(on_device(batch, paths))
            kept = [[n for n in path if n >= 0] for path in paths]
            for sequence, path in zip(sequences, kept, strict=True):
                for told in model.told[sequence].values():
                    told[-6:] = [told[len(told) - 6 + n] for n in path]
            accepted = batch.resources.device.tensor((4,), dtype("int32"))
            accepted.fill_from(np.array([len(path) for path in kept], np.int32))
            batch.step(dict.fromkeys(sequences, 1), accepted=accepted)
            batch.sync_lengths()
            batch.rewind(dict.fromkeys(sequences, 1))
            model.rewound |= set(sequences)
            assert [s.length for s in sequences] == [len(model.told[s][0]) for s in sequences]
            model.check()
        model.step(dict.fromkeys(sequences, 1))
        model.check()
        batch.audit()


def test_ids_that_name_no_move_change_nothing() -> None:
    config = tiny_config(None, 6, max_batch_size=4, max_step_tokens=6, max_batch_tokens=96, kv_cache_dtype="float32")
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io)
        sequences = batch.update(admit=[11, 3, 7])
        model.step({s: s.pending_tokens for s in sequences})
        model.step({sequences[0]: 6, sequences[1]: 2})
        before = pools(io, 2)
        outside = [[-1, -1, -1], [0, 1, 2], [0, 3, 1], [3, 4, 5]]  # in place; behind the step; no step; no sequence
        batch.move_tokens(on_device(batch, outside))
        batch.move_tokens(on_device(batch, [[6, -1, 2**31 - 1], [-(2**31), 0, 0], [1, 1, 1], [0, 1, 2]]))
        for found, old in zip(pools(io, 2), before, strict=True):
            assert np.array_equal(found, old)
        batch.move_tokens(on_device(batch, [[2, 2, 1, 5], [-1] * 4, [-1] * 4, [-1] * 4]))  # 2 -> 0, 5 -> 3
        told = model.told[sequences[0]]
        for layer in told.values():
            layer[11], layer[14] = layer[13], layer[16]
        model.check()


def test_the_places_of_retired_and_moved_rows() -> None:
    """A row's last step goes with it; a row that starts anew has none."""
    config = tiny_config(max_batch_size=3, max_step_tokens=4, max_batch_tokens=96, kv_cache_dtype="float32")
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io)
        first, second = batch.update(admit=[4, 5])
        model.step({first: 4, second: 5})
        model.step({first: 4, second: 4})
        model.retire(first)
        batch.compact()
        assert second.row == 0
        batch.admit(num_tokens=9)
        batch.move_tokens(on_device(batch, [[3], [3], [3]]))
        for told in model.told[second].values():
            told[5] = told[8]
        model.check()


def test_shared_pages_are_not_written() -> None:
    config = tiny_config(max_batch_size=2, max_step_tokens=6, max_batch_tokens=96, kv_cache_dtype="float32")
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io)
        parent = batch.admit(num_tokens=2)
        model.step({parent: 2})
        model.step({parent: 6})
        model.fork(parent)
        batch.move_tokens(on_device(batch, [[5], [5]]))
        model.check()


def test_it_can_be_captured() -> None:
    config = tiny_config(max_batch_size=1, max_step_tokens=4, max_batch_tokens=96, kv_cache_dtype="float32")
    with opened_io(config) as (batch, io):
        model, nodes = KVModel(batch, io), on_device(batch, [[-1, -1]])
        graph = batch.resources.device.capture(lambda stream: batch.move_tokens(nodes, stream=stream))
        sequence = batch.admit(num_tokens=4)
        model.step({sequence: 4})
        nodes.fill_from(np.array([[1, 3]], np.int32))
        graph.launch(batch.resources.stream)
        for told in model.told[sequence].values():
            told[:2] = [told[1], told[3]]
        model.check()
        graph.close()


def test_wrong_arrays_are_refused() -> None:
    with opened(tiny_config(max_batch_size=2)) as batch:
        device = batch.resources.device
        wrong = [device.tensor(shape, dtype(kind)) for shape, kind in (((2,), "int32"), ((3, 4), "int32"), ((2, 4), "int64"))]
        for tensor in (*wrong, device.tensor((2, 8), dtype("int32"))[:, ::2]):
            with pytest.raises(kv.ShapeError, match=r"nodes: .* a dense int32 \[2, A\] wanted"):
                batch.move_tokens(tensor)
        with pytest.raises(kv.InteropError):
            batch.move_tokens("nodes")
        for tensor in wrong:
            tensor._memory.close(batch.resources.stream)
