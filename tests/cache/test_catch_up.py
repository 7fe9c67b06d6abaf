"""What reads a step that catches up: its rows append different numbers of tokens, in a layout of its own."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.adapters.flash_attention import FlashAttention
from numba_kv.adapters.flashinfer import FlashInfer
from numba_kv.device import Tensor
from numba_kv.errors import InputError
from tests.helpers.attention import attention, close
from tests.helpers.deployments import pair
from tests.helpers.kv_model import uploaded
from tests.helpers.models import tiny_config
from tests.helpers.rounds import ROWS, RoundModel, opened_rounds

WIDTH = 3
LEFT_ALONE = 7


def kept(model: RoundModel, counts: Iterable[int]) -> dict[kv.Sequence, int]:
    """Verify all rows and keep so many tokens of each in the base."""
    model.verify()
    found = dict(zip(model.lengths, counts, strict=True))
    model.batch.commit(found)
    model.accepted({s: range(n) for s, n in found.items()})
    return found


def check_outputs(model: RoundModel, layer: int, q: np.ndarray, out: Tensor, appended: dict[kv.Sequence, int]) -> None:
    """Compare with the oracle what the draft's last step brought of the tokens that sequences appended in it."""
    assert model.draft is not None
    found, view = out.to_host(), model.batch.draft_view
    starts, others = view.cu_seqlens_q.to_host(), set(range(view.num_tokens))
    for sequence, own in zip(model.batch.sequences, model.batch.draft.sequences, strict=True):
        keys, values = np.stack(model.draft.told[own][layer], 1)
        for i in range(appended[sequence]):
            token, position = int(starts[sequence.row]) + i, len(keys) - appended[sequence] + i
            expected = attention(q[token], keys, values, position, model.draft.caches.storage(layer).window)
            close(found[token], expected, values)
            others.remove(token)
    assert not found[sorted(others)].any()
    assert (found[view.num_tokens :] == LEFT_ALONE).all()


def test_attention_of_rows_that_are_behind_by_different_amounts() -> None:
    """Behind another step over the same arrays, whose layout is not taken for theirs."""
    with opened_rounds("chain", keep_drafts=False, catch_up_tokens=WIDTH) as model:
        model.admit(9, 4, 1)
        assert model.draft is not None
        io = model.draft.io
        values = np.random.default_rng(3).normal(size=(ROWS * WIDTH, 2, 8)).astype(np.float32)
        q, out = uploaded(io, values), uploaded(io, values)
        with kv.PagedAttention(io.caches, io) as paged:

            def check(appended: dict[kv.Sequence, int]) -> None:
                view = model.batch.draft_view
                for layer in model.draft.layers:
                    bound = paged.bind_attend(layer, q, out, view=view)
                    for call in (
                        lambda layer=layer: paged.attend(layer, q, out, view),
                        lambda layer=layer: paged.attend_long(layer, q, None, None, None, None, out, view),
                        lambda bound=bound: bound(view),
                    ):
                        out.fill_from(np.full_like(values, LEFT_ALONE))
                        call()
                        check_outputs(model, layer, values, out, appended)

            model.draft_step()
            check(dict.fromkeys(model.lengths, 1))
            lacking = kept(model, (3, 1, 2))
            model.catch_up()
            check(lacking)
        for array in (q, out):
            array._memory.close(array.device.stream)


def test_a_bound_call_takes_steps_of_its_layout() -> None:
    with opened_rounds("chain", keep_drafts=False, catch_up_tokens=WIDTH) as model:
        model.admit(9, 4, 1)
        assert model.draft is not None
        io = model.draft.io
        q, out = (uploaded(io, np.full((ROWS * WIDTH, 2, 8), LEFT_ALONE, np.float32)) for _ in range(2))
        with kv.PagedAttention(io.caches, io) as paged:
            kept(model, (3, 1, 2))
            model.catch_up()
            view = model.batch.draft_view
            bound, plain = paged.bind_attend(0, q, out, view=view), paged.bind_attend(0, q, out)
            with pytest.raises(InputError, match=r"lie in another layout than was bound; bind_attend\(..., view=view\)"):
                plain(view)
            model.draft_step()
            with pytest.raises(InputError, match="lie in another layout"):
                bound(model.batch.draft_view)
            assert (out.to_host() == LEFT_ALONE).all()
            with pytest.raises(InputError, match="is not a step of this model"):
                paged.bind_attend(0, q, out, view=model.batch.verify_step())
        for array in (q, out):
            array._memory.close(array.device.stream)


def test_libraries_that_read_a_rows_last_query_as_its_last_token_refuse_it() -> None:
    limits = {"kv_cache_dtype": "float16", "page_tokens": 16, "max_batch_size": 3, "max_batch_tokens": 96, "heads": (1, 64)}
    base, draft = (tiny_config(None, max_kv_cache_capacity=n, **limits) for n in (64, 80))
    deployment = pair("mtp", base=base, draft=draft, steps=3)
    with kv.SharedResources.create_for_spec_decode(deployment) as resources, kv.SpeculativeBatch(resources) as batch:
        first, second = batch.update(admit=[3, 5])
        batch.step({first: 3, second: 5})
        batch.verify_step()
        batch.commit({first: 1, second: 2})
        view = batch.catch_up()
        assert view.counts_from_device
        for adapter in (FlashAttention(batch.draft, "fa3", arrays=np.asarray), FlashInfer(batch.draft, arrays=np.asarray)):
            with pytest.raises(InputError, match=r"fewer tokens than they have queries.*PagedAttention attends such a step"):
                adapter.step(view)
