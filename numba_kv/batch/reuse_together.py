"""One change of composition for the batches of a base and its draft: rows agree, and so do the lengths that are reused.

What the base has of a prompt and what the draft has differ: pages go one by one, and a draft that looks ahead has one position
less. Both begin with the longest prefix that both have, so that one position is computed next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Items
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from numba_kv.batch.arguments import listed
from numba_kv.batch.batch import Batch
from numba_kv.batch.changes import Change
from numba_kv.batch.sequence import Sequence
from numba_kv.errors import InputError

if TYPE_CHECKING:
    from numba_kv.batch.reuse_admission import Admission

__all__ = ["update_together"]

#: Times that leases are tried; the last time for nothing.
_ROUNDS = 4


def update_together(
    batches: Items[Batch],
    *,
    retire: Iterable[Items[Sequence]] = (),
    admit: Iterable[Any] = (),
    adapters: Iterable[str | None] | None = None,
) -> list[tuple[Sequence, ...]]:
    """Retire and admit sequences in several batches at once, as `Batch.update` does in one.

    Parameters
    ----------
    batches : sequence of Batch
        Of one SharedResources, the base first. All with `reuse`, or none.
    retire : iterable of sequences of Sequence
        Who ends: for each of them one of every batch.
    admit : iterable of (sequence of int), Prompt or int
        Prompts. All batches begin with equally many of their tokens, `Sequence.reused_tokens`: as many as all of them have.
    adapters : iterable of (str or None), optional
        LoRA adapters in the base. What a draft computes depends on them too.

    Returns
    -------
    list of tuple of Sequence
        One of every batch for each prompt.

    Raises
    ------
    InputError, StateError, CapacityError
        As `Batch.update`, or if the batches do not belong together; no row of any batch was changed.

    Stream: as `Batch.update`, for each batch.
    """
    batches, admitted = listed("batches", batches), listed("admit", admit)
    retired = [tuple(listed("retire", group)) for group in listed("retire", retire)]
    _check(batches, retired)
    try:
        for batch in batches if admitted else ():
            batch._publish_due()
        with ExitStack() as stack:
            for batch in batches:
                stack.enter_context(batch.guard.part)
            made = _update(batches, retired, admitted, adapters)
    finally:  # when no batch is in a call any more
        for batch in batches:
            batch.guard.finish()
    return list(zip(*made, strict=True))


def _check(batches: Items[Batch], retired: list[tuple[Any, ...]]) -> None:
    if not batches or not all(isinstance(batch, Batch) for batch in batches):
        raise InputError("batches: a sequence of at least one Batch is wanted, the base first")
    if len(set(map(id, batches))) < len(batches) or any(b.resources is not batches[0].resources for b in batches):
        raise InputError("batches: one of each model of one SharedResources is wanted")
    if any(batch.plan is batch.resources.plans[0] for batch in batches[1:]):
        raise InputError("batches: the base's is not the first; it decides about adapters, so begin with it, [base, draft]")
    if len({batch.reuse is None for batch in batches}) > 1:
        raise InputError("batches: some have reuse and some have not; then they cannot begin with equally many tokens")
    wrong = next((group for group in retired if len(group) != len(batches)), None)
    if wrong is not None:
        raise InputError(f"retire: {len(wrong)} sequences given together, {len(batches)} wanted, one of every batch")


def _update(
    batches: Items[Batch], retired: list[tuple[Any, ...]], admitted: list[Any], adapters: Iterable[str | None] | None
) -> list[list[Sequence]]:
    """Return the sequences that joined each batch."""
    changes: list[Change] = []
    try:
        _check_changes(batches, retired, admitted, adapters, changes)
        _agree(batches, changes)
        return [batch._make_change(change) for batch, change in zip(batches, changes, strict=True)]
    except BaseException:
        for batch, change in zip(batches, changes, strict=False):
            batch._drop_change(change)
        raise


def _check_changes(
    batches: Items[Batch],
    retired: list[tuple[Any, ...]],
    admitted: list[Any],
    adapters: Iterable[str | None] | None,
    changes: list[Change],
) -> None:
    """Add the change of each batch to `changes`, before anything is enqueued in one of them."""
    for batch in batches:
        batch._check_ready()
    for i, batch in enumerate(batches):
        owners = changes[0].held if changes else None
        leaving = [group[i] for group in retired]
        changes.append(batch._check_change(leaving, admitted, None if i else adapters, owners))


def _agree(batches: Items[Batch], changes: list[Change]) -> None:
    """Lease equally much of each prompt in all batches.

    Where there is less room than what was found, less is leased. Then all are asked for that, and in the end for nothing.
    """
    for batch, change in zip(batches, changes, strict=True):
        batch._leave(change)
    admissions = zip(*(change.admissions for change in changes), strict=True)
    most = [_common(batches, of_prompt) for of_prompt in admissions]
    for left in reversed(range(_ROUNDS)):
        for batch, change in zip(batches, changes, strict=True):
            batch._lease_change(change, most)
        leases = zip(*(change.leases for change in changes), strict=True)
        found = [{0 if lease is None else lease.plan.reused_tokens for lease in of_prompt} for of_prompt in leases]
        if all(len(lengths) == 1 for lengths in found):
            return
        for batch, change in zip(batches, changes, strict=True):
            batch._drop_leases(change)
        most = [min(lengths) if left > 1 else 0 for lengths in found]


def _common(batches: Items[Batch], admissions: Items[Admission | None]) -> int | None:
    """Return of how many tokens of a prompt all batches have what they need; None if nobody knows its tokens."""
    pairs = [(b.reuse.admission, a) for b, a in zip(batches, admissions, strict=True) if b.reuse is not None and a is not None]
    for admission, wanted in pairs:
        admission.bring_back(wanted)
    most = None
    while pairs:
        found = {admission.find(wanted.capped(most)).reused_tokens for admission, wanted in pairs}
        most = min(found)
        if len(found) == 1:
            break
    return most
