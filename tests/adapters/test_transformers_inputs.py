"""What caches and decoders are handed by mistake: refused by name, and nothing is stored."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from tests.helpers.transformers_models import prompt, tiny, torch

from numba_kv.adapters.transformers import PagedCache  # isort: skip  # behind the helper, which skips where there is no torch
from numba_kv.adapters.transformers_decoder import GreedyDecoder
from numba_kv.adapters.transformers_packed import PackedCache
from numba_kv.errors import CapacityError, InputError, ShapeError, StateError

ROWS = "is not the number of a row; integers along one axis are wanted"


@pytest.fixture(autouse=True)
def not_in_sim(target: str) -> None:
    if target == "sim":
        pytest.skip("the simulator takes too long for attention over pages")


def opened(model: Any, target: str) -> PagedCache:
    return PagedCache.for_model(model, max_batch=3, max_tokens=32, page_tokens=4, attention="paged", target=target)


def refused(call: Any, value: Any, complaint: str, error: type[Exception] = InputError) -> None:
    with pytest.raises(error, match=complaint):
        call(value)


def test_packed_tokens_are_those_of_the_step(target: str) -> None:
    model, sizes = tiny("llama", target), {"max_batch": 3, "max_tokens": 32, "page_tokens": 4, "target": target}
    with PackedCache.for_model(model, **sizes) as cache, PackedCache.for_model(model, **sizes) as other:
        a, b, idle = cache.batch.update(admit=[5, 9, 2])
        x, y = other.batch.update(admit=[5, 9])
        view = cache.batch.step({b: 9, a: 5})
        ids, ids_b = list(range(1, 6)), list(range(11, 20))
        for tokens, complaint in [
            ({a: ids_b, b: ids}, r"tokens: 9 given, the step has 5 for Sequence\(row 0, generation 1"),
            ({a: ids + ids_b}, r"tokens: none given, the step has 9 for Sequence\(row 1, generation 2"),
            ({x: ids, y: ids_b}, r"Sequence\(row 0, .* is none of the 2 sequences of this batch that are in the step"),
            ({a: ids, b: ids_b, idle: []}, r"Sequence\(row 2, .* is none of the 2 sequences"),
            ({a: ids, b: ids_b, "c": [1]}, "tokens: 'c' is none of the 2 sequences"),
            ({a: ids, b: [1.5] * 9}, r"elements of torch.float32 given for Sequence\(row 1, .*, integers wanted"),
            ({a: [True] * 5, b: ids_b}, r"elements of torch.bool given for Sequence\(row 0"),
            ({a: None, b: ids_b}, r"NoneType given for Sequence\(row 0, .*, token ids wanted"),
            ({a: [10**30] * 5, b: ids_b}, r"list given for Sequence\(row 0, .*, token ids wanted"),
            (None, "tokens: NoneType given, a mapping"),
        ]:
            refused(lambda tokens: cache.model_inputs(view, tokens), tokens, complaint)
        inputs = cache.model_inputs(view, {b: np.array(ids_b, np.int32), a: torch.tensor([ids])})
        assert inputs["input_ids"].tolist() == [ids + ids_b]
        cache.batch.retire(a)
        refused(lambda tokens: cache.model_inputs(view, tokens), {b: ids_b}, "rows of this one have gone", StateError)


@pytest.mark.parametrize("rows", [0, 2])
def test_numbers_of_rows(rows: int, target: str) -> None:
    model = tiny("llama", target)
    with opened(model, target) as cache, torch.no_grad():
        if rows:
            model(prompt(4, target, (0, 0))["input_ids"], cache=cache)
        stored = cache.stored_tokens
        outside = "is not one of the 2 rows of the cache" if rows else "is not one of the 3 rows that the cache was made for"
        for name, call in (("beam_idx", cache.reorder_cache), ("indices", cache.batch_select_indices)):
            for wrong in (torch.tensor([0.0, 1.0]), np.zeros(2), [True, 0], ["a"], [None], [[0, 1]], torch.tensor([[0, 1]])):
                refused(call, wrong, f"{name}: .* {ROWS}")
            for wrong in (None, 1, torch.tensor(1)):
                refused(call, wrong, f"{name}: .* cannot be iterated")
            for wrong in ([0, 3], torch.tensor([0, -1]), [10**20]):
                refused(call, wrong, outside)
            refused(call, [0] * 4, "rows: 4 wanted, the cache was made for max_batch 3", CapacityError)
        refused(cache.batch_select_indices, torch.ones((2, 2), dtype=torch.bool), ROWS)
        if rows:
            refused(cache.batch_select_indices, torch.tensor([True]), ROWS)
            refused(cache.batch_repeat_interleave, 10**9, "rows: 2000000000 wanted", CapacityError)
        for wrong in (0, -1, True, "a", 1.5, None):
            refused(cache.batch_repeat_interleave, wrong, f"repeats: {wrong!r} is not an integer from 1")
        for wrong in (True, "a", -1.5, None, torch.tensor(-1.0)):
            refused(cache.crop, wrong, "tokens_to_remove: .* is no integer; 0, or minus")
        assert cache.stored_tokens == stored
        cache.batch.audit()


def test_what_a_decoder_is_given(target: str) -> None:
    model, inputs = tiny("llama", target), prompt(5, target, (0, 0))
    ids = inputs["input_ids"]
    with opened(model, target) as cache:
        decoder = GreedyDecoder(model, cache)

        def generate(given: Any, mask: Any = None) -> Any:
            return decoder.generate(given, mask, max_new_tokens=2)

        for wrong in (None, 5, [[1, 2]], ids.cpu().numpy()):
            refused(generate, wrong, f"input_ids: {type(wrong).__name__} given, a torch.Tensor of token ids wanted")
        refused(generate, ids.float(), "input_ids: elements of torch.float32 given, torch.int64 wanted")
        for shape in ((5,), (1, 2, 3), (0, 4)):
            refused(generate, torch.ones(shape, dtype=torch.int64), r"input_ids: shape .* given, \[rows, tokens\]", ShapeError)

        def masked(mask: Any) -> Any:
            return generate(ids, mask)

        for wrong in (5, "x", np.ones((2, 5))):
            refused(masked, wrong, f"attention_mask: {type(wrong).__name__} given, a torch.Tensor or None wanted")
        for shape in ((1, 5), (2, 4), (2, 5, 1)):
            refused(masked, torch.ones(shape), r"attention_mask: shape .* given, \[2, 5\] wanted, as input_ids", ShapeError)
        for pads in ([1], [0, 1]):
            mask = torch.ones_like(ids)
            mask[pads] = 0
            refused(masked, mask, f"attention_mask: row {pads[0]} has no token, only pads")
        assert cache.stored_tokens == []

        found = generate(ids)
        for wrong in (None, 5, [[1], [2]]):
            refused(lambda tokens: decoder.decode(tokens, 2), wrong, "tokens: .* given, a torch.Tensor of token ids wanted")
        refused(lambda tokens: decoder.decode(tokens, 2), found[:, -1:].float(), "tokens: elements of torch.float32 given")
        assert cache.stored_tokens == [6, 6]
        cache.batch.audit()
    refused(generate, ids, "PagedCache is closed", StateError)


@pytest.mark.parametrize("most", [0, -1, True, 1.5])
@pytest.mark.parametrize("kind", [PagedCache, PackedCache])
def test_most_tokens_of_a_step(kind: Any, most: Any, target: str) -> None:
    model = tiny("llama", target)
    with pytest.raises(InputError, match=f"max_batch_tokens: {most} is not an integer from 1"):
        kind.for_model(model, max_batch=1, max_tokens=8, max_batch_tokens=most, target=target)


@pytest.mark.skipif("SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}), reason="this system does not say what it has")
def test_caches_that_the_host_cannot_hold_are_refused(target: str) -> None:
    """The system would give the memory, and end the process when it is used."""
    if target == "cuda":
        pytest.skip("the driver knows what a device has")
    with pytest.raises(CapacityError, match="bytes are wanted, the machine has .* lower max_batch or max_tokens"):
        PagedCache.for_model(tiny("llama", target), max_batch=1, max_tokens=1 << 30, target=target)
