"""Everything nonsensical that can be passed to a batch: a typed error names it, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from tests.helpers.batches import everything, metadata, opened, same
from tests.helpers.models import tiny_config

Refused = Callable[[kv.Batch, kv.Sequence], Any]


@pytest.fixture
def batch() -> Iterator[kv.Batch]:
    """Three rows of 64 tokens, at most 80 tokens a step; two sequences, of 9 tokens and of none of 5 yet."""
    with opened(tiny_config(None, 6, max_batch_size=3, max_batch_tokens=80)) as batch:
        sequence, _ = batch.update(admit=[9, 5])
        batch.step({sequence: 9})
        yield batch


def check(batch: kv.Batch, call: Refused, error: type[kv.NumbaKVError], message: str) -> None:
    """Call, and check that it is refused and that nothing, counters included, is another than before."""
    before = everything(batch)
    with pytest.raises(error, match=message) as refused:
        call(batch, batch.sequences[0])
    assert type(refused.value) is error
    same(everything(batch), before)
    first, second = batch.sequences
    batch.step({first: 1, second: 5})
    batch.audit()


def _name(value: object) -> str:
    """Return what a value prints without its address, so that a test has one name in every process."""
    return repr(value).split(" at 0x")[0]


NOT_COUNTS = [0, -1, 1.0, 1.5, True, False, None, "1", b"1", [], [1], (1,), {}, object, float("nan"), 1j]
NOT_COUNTS += [np.float64(1), np.bool_(True), np.array(1.5), np.array([1]), np.zeros((1, 1), int)]


@pytest.mark.parametrize("count", NOT_COUNTS, ids=_name)
def test_counts_of_a_step(batch: kv.Batch, count: Any) -> None:
    check(batch, lambda b, s: b.step({s: count}), kv.InputError, r"tokens: .*for Sequence\(row 0.* is not a positive integer")


@pytest.mark.parametrize("count", [c for c in NOT_COUNTS if not isinstance(c, dict)], ids=_name)
def test_counts_of_every_sequence(batch: kv.Batch, count: Any) -> None:
    check(batch, lambda b, s: b.step(count), kv.InputError, "tokens: .*is not a positive integer")


@pytest.mark.parametrize("count", NOT_COUNTS, ids=_name)
def test_counts_of_a_rewind(batch: kv.Batch, count: Any) -> None:
    check(batch, lambda b, s: b.rewind({s: count}), kv.InputError, r"rewind: .* is not in 1\.\.9")


@pytest.mark.parametrize("count", NOT_COUNTS, ids=_name)
def test_counts_of_a_question(batch: kv.Batch, count: Any) -> None:
    check(batch, lambda b, s: b.can_admit(count), kv.InputError, "num_tokens: .* is not a positive integer")


@pytest.mark.parametrize("huge", [81, 2**31, 2**63, 2**64, 10**30, np.int64(2**62), np.uint64(2**63)])
def test_counts_that_are_too_large(batch: kv.Batch, huge: Any) -> None:
    check(batch, lambda b, s: b.step({s: huge}), kv.InputError, f"tokens: {huge}.*max_batch_tokens is 80")
    check_again = [
        (lambda b, s: b.step(huge), kv.InputError, "max_batch_tokens is 80"),
        (lambda b, s: b.rewind({s: huge}), kv.InputError, r"is not in 1\.\.10"),
        (lambda b, s: b.admit(num_tokens=huge), kv.CapacityError, f"{huge} tokens exceeds max_kv_cache_capacity 64"),
    ]
    for call, error, message in check_again:
        before = everything(batch)
        with pytest.raises(error, match=message):
            call(batch, batch.sequences[0])
        same(everything(batch), before)
    assert not batch.can_admit(huge)


def test_all_counts_of_a_step_are_too_many(batch: kv.Batch) -> None:
    second = batch.sequences[1]
    check(batch, lambda b, s: b.step({s: 40, second: 41}), kv.InputError, "tokens: 81 in one step, max_batch_tokens is 80")


def test_a_row_would_overflow(batch: kv.Batch) -> None:
    """A position at the capacity is refused before anything is written. sparkinfer#41, vllm#53982."""
    check(batch, lambda b, s: b.step({s: 56}), kv.CapacityError, "56 more for .*of length 9 exceed max_kv_cache_capacity 64")
    with pytest.raises(kv.CapacityError) as refused:
        batch.step({batch.sequences[0]: 55})
    assert (refused.value.needed, refused.value.free) == (55, 54)
    batch.step({batch.sequences[0]: 54})


def test_one_overflowing_row_refuses_all_of_a_step(batch: kv.Batch) -> None:
    second = batch.sequences[1]
    check(batch, lambda b, s: b.step({second: 5, s: 56}), kv.CapacityError, "exceed max_kv_cache_capacity 64")


NOT_SEQUENCES = [None, 0, "row 0", 1.5, object(), (0,)]


@pytest.mark.parametrize("wrong", NOT_SEQUENCES, ids=_name)
@pytest.mark.parametrize(
    "call",
    [
        lambda b, w: b.step({w: 1}),
        lambda b, w: b.rewind({w: 1}),
        lambda b, w: b.retire(w),
        lambda b, w: b.update(retire=[w], admit=[3]),
        lambda b, w: b.compact([w]),
    ],
    ids=["step", "rewind", "retire", "update", "compact"],
)
def test_what_is_no_sequence(batch: kv.Batch, call: Callable[[kv.Batch, Any], Any], wrong: Any) -> None:
    check(batch, lambda b, s: call(b, wrong), kv.InputError, "is not a Sequence")


@pytest.mark.parametrize("wrong", [5, None, 1.5, object()], ids=_name)
def test_lists_that_are_none(batch: kv.Batch, wrong: Any) -> None:
    check(batch, lambda b, s: b.update(retire=wrong), kv.InputError, "retire: .* cannot be iterated")
    with pytest.raises(kv.InputError, match="admit: .* cannot be iterated"):
        batch.update(admit=wrong)
    if wrong is not None:
        with pytest.raises(kv.InputError, match="order: .* cannot be iterated"):
            batch.compact(wrong)
    batch.audit()


@pytest.mark.parametrize("call", ["retire", "order"])
def test_a_sequence_in_the_place_of_a_list(batch: kv.Batch, call: str) -> None:
    calls = {"retire": lambda b, s: b.update(retire=s), "order": lambda b, s: b.compact(s)}
    check(batch, calls[call], kv.InputError, f"{call}: Sequence.* cannot be iterated; pass a list")


def test_sequences_of_another_batch(batch: kv.Batch) -> None:
    with opened(tiny_config(None)) as other:
        stranger = other.admit(num_tokens=3)
        for call in (
            lambda b, s: b.step({stranger: 1}),
            lambda b, s: b.retire(stranger),
            lambda b, s: b.rewind({stranger: 1}),
        ):
            before = everything(batch)
            with pytest.raises(kv.StateError, match="is not active in this batch"):
                call(batch, None)
            same(everything(batch), before)
        other.audit()


def test_a_mapping_that_names_nobody(batch: kv.Batch) -> None:
    check(batch, lambda b, s: b.step({}), kv.InputError, "the mapping is empty")
    with pytest.raises(kv.InputError, match="at least one sequence"):
        batch.rewind({})


@pytest.mark.parametrize("wrong", [None, 1, [1], "1"], ids=_name)
def test_a_rewind_without_a_mapping(batch: kv.Batch, wrong: Any) -> None:
    check(batch, lambda b, s: b.rewind(wrong), kv.InputError, "a mapping of at least one sequence")


def test_a_rewind_beyond_the_start(batch: kv.Batch) -> None:
    check(batch, lambda b, s: b.rewind({s: 10}), kv.InputError, r"rewind: 10 tokens of .* is not in 1\.\.9 \(its length\)")


def test_a_rewind_of_an_empty_sequence(batch: kv.Batch) -> None:
    second = batch.sequences[1]
    check(batch, lambda b, s: b.rewind({second: 1}), kv.InputError, "1 tokens of")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "a prompt of 0 tokens"),
        ((), "a prompt of 0 tokens"),
        (np.zeros(0, int), "a prompt of 0 tokens"),
        ("hello", "tokens of type str"),
        (b"hello", "tokens of type bytes"),
        ({1: 2}, "tokens of type dict"),
        ({1, 2}, "tokens of type set"),
        ([[1, 2], [3]], r"token 0 is \[1, 2\], which is not a token id"),
        ([1.5], "token 0 is 1.5"),
        (["a"], "token 0 is 'a'"),
        ([None], "token 0 is None"),
        ([-5], "token 0 is -5, which is not a token id"),
        ([1, None], "token 1 is None"),
        ((1, True), "token 1 is True"),
        ([np.int32(1), np.int32(-2)], "token 1 is .*-2"),
        (range(2, -2, -1), "token 3 is -1"),
        (np.array([3, -1]), "token 1 is .*-1"),
        (np.array([1.0]), "tokens of float64 are not token ids"),
        (np.zeros((1, 3), int), "tokens of type ndarray are not a one-dimensional"),
        (np.zeros(3), "tokens of float64 are not token ids"),
        (np.zeros(3, bool), "tokens of bool are not token ids"),
        (np.array(1.5), "tokens of type ndarray"),
        (iter([1, 2]), "is neither a sequence of token ids nor their number"),
        (1.5, "is neither a sequence of token ids nor their number"),
        (True, "is neither a sequence of token ids nor their number"),
        (object(), "is neither a sequence of token ids nor their number"),
    ],
    ids=_name,
)
def test_prompts(batch: kv.Batch, wrong: Any, message: str) -> None:
    check(batch, lambda b, s: b.admit(tokens=wrong), kv.InputError, message)
    before = everything(batch)
    with pytest.raises(kv.InputError, match=message):
        batch.update(admit=[3, wrong] if not isinstance(wrong, type(iter([]))) else [wrong])
    same(everything(batch), before)


@pytest.mark.parametrize("count", [c for c in NOT_COUNTS if c is not None], ids=_name)
def test_numbers_of_prompt_tokens(batch: kv.Batch, count: Any) -> None:
    check(batch, lambda b, s: b.admit(num_tokens=count), kv.InputError, "num_tokens: |a prompt of (0|-1) tokens")


def test_a_number_is_not_token_ids(batch: kv.Batch) -> None:
    check(batch, lambda b, s: b.admit(tokens=7), kv.InputError, "tokens: 7 is not a sequence of token ids")


def test_neither_tokens_nor_their_number(batch: kv.Batch) -> None:
    check(batch, lambda b, s: b.admit(), kv.InputError, "give either tokens or num_tokens")
    with pytest.raises(kv.InputError, match="give either tokens or num_tokens"):
        batch.admit(tokens=[1], num_tokens=1)


def test_a_prompt_longer_than_a_row(batch: kv.Batch) -> None:
    check(batch, lambda b, s: b.admit(tokens=range(65)), kv.CapacityError, "65 tokens exceeds max_kv_cache_capacity 64")


def test_more_sequences_than_rows(batch: kv.Batch) -> None:
    check(batch, lambda b, s: b.update(admit=[3, 3]), kv.CapacityError, "2 sequences are to be admitted, 1 of 3 rows are free")
    with pytest.raises(kv.CapacityError) as refused:
        batch.update(retire=[batch.sequences[0]], admit=[1, 1, 1])
    assert (refused.value.needed, refused.value.free) == (3, 2)
    assert len(batch.sequences) == 2


def test_a_sequence_that_is_to_end_twice(batch: kv.Batch) -> None:
    check(batch, lambda b, s: b.update(retire=[s, s]), kv.InputError, "named twice")


def test_orders_that_are_no_permutation(batch: kv.Batch) -> None:
    """A map of rows with a duplicate or a missing row is refused before anything moves. vllm#51890, tt-xla#5778."""
    first, second = batch.sequences
    for order in ([first], [first, first], [], [first, second, first]):
        before = everything(batch)
        with pytest.raises(kv.InputError, match=f"order: {len(order)} sequences given, the 2 active ones once each wanted"):
            batch.compact(order)
        same(everything(batch), before)


def test_a_step_of_everyone_while_a_prompt_waits(batch: kv.Batch) -> None:
    check(batch, lambda b, s: b.step(1), kv.StateError, r"step: Sequence\(row 1.*5 unprefilled tokens")


def test_a_step_of_nobody() -> None:
    with opened(tiny_config(None)) as batch:
        with pytest.raises(kv.StateError, match="no sequence is active"):
            batch.step(1)
        batch.audit()


@pytest.mark.parametrize("wrong", [None, 5, "resources", object()], ids=_name)
def test_resources_of_another_kind(wrong: Any) -> None:
    with pytest.raises(kv.InputError, match="is not a SharedResources"):
        kv.Batch(wrong)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_integers_of_any_kind_are_integers(kind: type[np.integer]) -> None:
    """NumPy's integers count like Python's, also without axes, and do not overflow. numba-cuda#623, numba-cuda#774."""
    with opened(tiny_config(None, 6, max_batch_size=3)) as batch:
        first = batch.admit(num_tokens=kind(9))
        assert batch.can_admit(kind(3))
        second = batch.update(admit=[np.array(3, kind)])[0]
        third = batch.admit(tokens=np.array([1, 2, 3], kind))
        batch.step({first: kind(9), second: np.array(3, kind), third: kind(3)})
        batch.step(kind(1))
        batch.step(np.array(1, kind))
        batch.rewind({first: kind(1)})
        assert [s.length for s in batch.sequences] == [10, 5, 5]
        batch.audit()


def test_refusals_leave_no_trace() -> None:
    """A script with refused calls between its own ends where it ends without them. kvcached#364, imp#1050."""

    def script(refuse: Callable[[kv.Batch], None]) -> dict[str, np.ndarray]:
        config = tiny_config(None, 6, max_batch_size=3, num_kv_pages=18, max_batch_tokens=80, lookahead_pages=1)
        with opened(config) as batch:
            first, second = batch.update(admit=[20, 30])
            refuse(batch)
            batch.step({first: 20, second: 30})
            refuse(batch)
            third = batch.update(retire=[first], admit=[12])[0]
            for _ in range(3):
                batch.step({third: 4, second: 1})
                refuse(batch)
            batch.compact([third, second])
            refuse(batch)
            batch.step(1)
            refuse(batch)
            batch.step(1)
            return metadata(batch)

    def refuse(batch: kv.Batch) -> None:
        one, *_ = batch.sequences
        for call in (
            lambda: batch.step({one: 65}),
            lambda: batch.step(dict.fromkeys(batch.sequences, 40)),
            lambda: batch.step(0),
            lambda: batch.rewind({one: 64}),
            lambda: batch.update(retire=batch.sequences, admit=[1, 1, 1, 1]),
            lambda: batch.update(retire=[one], admit=[0]),
            lambda: batch.compact([one, one]),
        ):
            with pytest.raises((kv.InputError, kv.CapacityError, kv.StateError)):
                call()

    same(script(refuse), script(lambda batch: None))
