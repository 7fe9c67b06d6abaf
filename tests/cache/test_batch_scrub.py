"""What freed pages hold: nothing changed, only finite numbers, zeros or NaN; pages of others and the null page never."""

from __future__ import annotations

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.cache import KVIO
from tests.helpers.batches import opened, pages_of
from tests.helpers.kv_model import KVModel, opened_io, uploaded
from tests.helpers.kv_pools import NUMPY, same_bits
from tests.helpers.models import chunked, tiny_config


def pool(batch: kv.Batch, layer: int) -> np.ndarray:
    """Return K and V by page: [2, N, ...]."""
    return batch.resources.cache_managers[0].kv(layer).to_host()


def written(batch: kv.Batch, io: KVIO, sequence: kv.Sequence, kind: str, tokens: int) -> None:
    """Append tokens whose numbers are 3, and here and there NaN or infinite."""
    view = batch.step({sequence: tokens})
    for layer in range(len(batch.plan.config.layers)):
        storage = batch.resources.cache_managers[0].storage(layer)
        values = np.full((tokens, storage.num_kv_heads, storage.head_dim), 3, np.float32)
        values[::2, :, 0] = np.nan
        if kind != "float8_e4m3":
            values[1::2, :, -1] = -np.inf
        given = uploaded(io, values.astype(NUMPY[kind]))
        io.write(layer, given, given, view)


@pytest.mark.parametrize("kind", NUMPY)
@pytest.mark.parametrize("policy", ["never", "on_nonfinite", "always", "poison"])
def test_pages_of_a_sequence_that_leaves(policy: str, kind: str) -> None:
    config = tiny_config(
        None, 6, chunked(8), 6, heads=[(2, 8), (1, 8), (3, 5), (1, 1)], page_tokens=2, max_batch_size=2,
        max_batch_tokens=96, kv_cache_dtype=kind,
    )  # fmt: skip
    with opened_io(config, scrub=policy) as (batch, io):
        stays, leaves = batch.update(admit=[9, 11])
        written(batch, io, stays, kind, 9)
        written(batch, io, leaves, kind, 11)
        groups = [storage.group for storage in map(batch.resources.cache_managers[0].storage, range(4))]
        blocks = [table.to_host()[leaves.row] for table in batch.resources.cache_managers[0].step_buffers.block_tables]
        rings = [blocks[g][: batch.plan.groups[g].ring].tolist() for g in groups]  # what is not mapped too
        pages = [ring or pages_of(batch, leaves, g) for ring, g in zip(rings, groups, strict=True)]
        before = [pool(batch, layer) for layer in range(4)]
        batch.retire(leaves)
        for layer in range(4):
            expected = before[layer].copy()
            freed = expected[:, pages[layer]].astype(np.float32)
            if policy == "on_nonfinite":
                freed[~np.isfinite(freed)] = 0
            elif policy == "always":
                freed[:] = 0
            found = pool(batch, layer)
            if policy == "poison":
                assert np.isnan(found[:, pages[layer]].astype(np.float32)).all()
                found[:, pages[layer]] = expected[:, pages[layer]]
            elif policy != "never":
                expected[:, pages[layer]] = freed.astype(NUMPY[kind])
            assert same_bits(found, expected)
            assert not found[:, batch.plan.groups[groups[layer]].null_page].astype(np.float32).any()
        batch.audit()


def is_zero(batch: kv.Batch, pages: list[int]) -> list[bool]:
    found = pool(batch, 0).astype(np.float32)
    return [not found[:, page].any() for page in pages]


@pytest.mark.parametrize("together", [True, False])
def test_shared_pages_are_scrubbed_when_the_last_holder_leaves(together: bool) -> None:
    config = tiny_config(max_batch_size=3, max_batch_tokens=96, lookahead_pages=0, kv_cache_dtype="float32")
    with opened_io(config, scrub="always") as (batch, io):
        model = KVModel(batch, io)
        parent = batch.admit(num_tokens=14)
        model.step({parent: 14})
        child = model.fork(parent)
        model.step({parent: 1, child: 1})
        shared, own = pages_of(batch, parent, 0)[:3], pages_of(batch, child, 0)[3:]
        if together:
            batch.update(retire=[parent, child])
        else:
            batch.retire(child)
            del model.told[child]
            assert is_zero(batch, shared + own) == [False] * 3 + [True]
            model.check()
            batch.retire(parent)
        assert is_zero(batch, shared + own) == [True] * 4
        batch.audit()


def test_pages_that_are_taken_back_or_given_up_are_scrubbed() -> None:
    config = tiny_config(max_batch_size=3, num_kv_pages=17, max_batch_tokens=96, lookahead_pages=0, kv_cache_dtype="float32")
    with opened_io(config, scrub="always") as (batch, io):
        model = KVModel(batch, io)
        first, second = batch.update(admit=[28, 30])
        model.step({first: 28, second: 30})
        model.rewind(first, 20)
        ahead = pages_of(batch, first, 0)[2:]
        assert not any(is_zero(batch, ahead))
        model.step({second: 22})  # needs pages that run ahead of the other
        taken = set(ahead) - set(pages_of(batch, first, 0))
        assert taken
        model.check()
        batch.audit()
        child = model.fork(first)
        model.step({first: 1})
        mine = pages_of(batch, first, 0)[2:]
        model.rewind(first, 9)  # to nothing: it gives up what the child shares
        assert all(is_zero(batch, mine))
        model.check()
        assert child.length == 8
        batch.audit()


def test_a_batch_without_nan_never_reads_poison() -> None:
    """Sequences come, fork, rewind, swap and go; what each reads is what it wrote."""
    config = tiny_config(
        None, 6, heads=[(1, 4), (2, 3)], page_tokens=2, max_batch_size=3, max_batch_tokens=96, num_kv_pages=40,
        kv_cache_dtype="float32", max_step_tokens=2,
    )  # fmt: skip
    with opened_io(config, scrub="poison") as (batch, io):
        model = KVModel(batch, io)
        first = batch.admit(num_tokens=13)
        model.step({first: 13})
        second = model.fork(first)
        model.step({first: 1, second: 2})
        waiting = batch.swap_out(first)
        model.inherit(first, waiting)
        model.check()
        model.rewind(second, 2)
        model.step({second: 3})
        first = batch.swap_in(waiting)
        model.inherit(waiting, first)
        with batch.capture_kv(second, 0, second.length) as snapshot:
            third = batch.admit(num_tokens=20)
            batch.restore_kv(third, snapshot)
            model.inherit(second, third)
        model.step({first: 1, second: 1, third: 1})
        model.check()
        batch.clear()
        batch.audit()


@pytest.mark.parametrize("policy", ["sometimes", None, True, ["never"]])
def test_an_unknown_policy_is_refused(policy: object) -> None:
    with kv.SharedResources.create_for_llm(tiny_config()) as resources:
        with pytest.raises(kv.InputError, match="scrub: .* is not one of never, on_nonfinite, always, poison"):
            kv.Batch(resources, scrub=policy)
        with kv.Batch(resources) as batch:
            batch.audit()


def test_a_group_without_layers_of_its_own() -> None:
    with opened(tiny_config(5)) as batch:
        batch.close()
        with kv.Batch(batch.resources, scrub="always") as second:
            second.retire(second.admit(num_tokens=3))
            second.audit()
