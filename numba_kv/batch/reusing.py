"""ReusingSequences: the calls of a Batch that begin with what others have computed, and leave it to others."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from numba_kv.batch.arguments import at_least_one, one_prompt
from numba_kv.batch.changes import RowChanges
from numba_kv.batch.prompt import Prompt
from numba_kv.batch.reuse import BatchReuse
from numba_kv.batch.reuse_events import ReuseEvents
from numba_kv.batch.reuse_limits import check_reuse
from numba_kv.batch.sequence import Sequence
from numba_kv.context.options import ReuseOptions
from numba_kv.context.prefix_file import file_to_write
from numba_kv.errors import InputError

if TYPE_CHECKING:
    from numba_kv.ledger.reuse.content import MediaSpan
    from numba_kv.ledger.reuse.policy import PublishPolicy

__all__ = ["ReusingSequences"]


class ReusingSequences(RowChanges):
    """Part of Batch: admit a sequence with what is kept of its beginning, and say what it leaves behind."""

    @abstractmethod
    def update(
        self, *, retire: Iterable[Sequence] = (), admit: Iterable[Any] = (), adapters: Iterable[str | None] | None = None
    ) -> list[Sequence]:
        """Retire and admit several sequences at once."""

    def admit(
        self,
        tokens: Any = None,
        *,
        num_tokens: int | None = None,
        adapter: str | None = None,
        policy: PublishPolicy | None = None,
        salt: bytes | None = None,
        rope: bytes | None = None,
        media: Iterable[MediaSpan] = (),
        most_reused: int | None = None,
    ) -> Sequence:
        """Give a new sequence a row.

        With `reuse`, a sequence that is admitted by its tokens starts with as much of them as is kept:
        `Sequence.reused_tokens`. Only the rest is pending. The pages it starts with are read-only, and what it publishes
        becomes so: a rewind into them copies a page, and the device takes none of them back.

        Parameters
        ----------
        tokens : sequence of int, optional
            Its prompt.
        num_tokens : int, optional
            Instead: how many tokens the prompt has. Then nothing is reused and nothing kept.
        adapter : str, optional
            Name of the LoRA adapter that the sequence computes with; see `update`.
        policy : PublishPolicy, optional
            What the sequence reuses and leaves behind; default: that of the batch's options.
        salt : bytes, optional
            A tenant's secret: sequences with different ones share nothing.
        rope : bytes, optional
            Which of several rotary tables its positions are turned by; to be given where short and long sequences have
            different ones.
        media : iterable of MediaSpan
            Items that tokens of the prompt stand for.
        most_reused : int, optional
            Most of its tokens that are reused.

        Raises
        ------
        InputError
            If neither or both are given, or the prompt is empty or not one-dimensional; if the adapter is not loaded; if
            `policy`, `salt`, `rope` or `media` are given to a batch without `reuse`, or do not fit.
        CapacityError
            If no row is free, or the prompt is longer than a row.

        Stream: enqueues one copy and one kernel; with something to reuse two of each more, one more of each for every block of
        page ids, and one copy and one kernel for each slab if the last page is used in part.
        """
        given = one_prompt(tokens, num_tokens)
        prompt = Prompt(given, policy, salt, rope, media, most_reused)
        if tokens is None or self.reuse is None:
            prompt.check_plain()
        adapters = None if adapter is None else [adapter]
        return self.update(admit=[given if tokens is None else prompt], adapters=adapters)[0]

    def note_tokens(self, sequence: Sequence, tokens: Any, media: Iterable[MediaSpan] = ()) -> None:
        """Say which tokens follow those of a sequence that are known: what was generated, so that it can be kept too.

        Only of use with a policy that publishes "all". A page is published once the sequence is `max_step_tokens` longer, so
        that drafts can still be taken back, and at its end.

        Parameters
        ----------
        sequence : Sequence
            Admitted by its tokens. `known_tokens` says how many are known; a rewind forgets those behind it.
        tokens : sequence of int
            Only tokens that stay; they may be told before the step that appends them.
        media : iterable of MediaSpan
            Items that some of them stand for.

        Raises
        ------
        InputError, ShapeError, StateError
            If they are no token ids, the batch has no `reuse`, or nothing is known of the sequence.

        Stream: enqueues nothing.
        """
        with self.guard.host:
            self._reuse_of("note_tokens").contexts.extend(self._named(sequence, "note_tokens"), tokens, media)

    def known_tokens(self, sequence: Sequence) -> int:
        """Return how many first tokens of a sequence the batch knows; 0 if it was not admitted by its tokens."""
        with self.guard.host:
            return self._reuse_of("known_tokens").contexts.known_tokens(self._named(sequence, "known_tokens"))

    def prefill_chunk(self, sequence: Sequence, limit: int | None = None) -> int:
        """Return how many pending tokens of a sequence the next step should append: `limit`, or less to end at a point.

        Parameters
        ----------
        limit : int, optional
            Most tokens; default all that are pending.

        Raises
        ------
        InputError, StateError
            If `limit` is not positive or `sequence` not active.
        """
        with self.guard.host:
            row = self._row_of(sequence, "prefill_chunk")
            length = self._exact_length(row, "prefill_chunk")
            pending = max(0, sequence.prompt_tokens - length)
            count = pending if limit is None else min(pending, at_least_one("limit", limit))
            return count if self.reuse is None else self.reuse.contexts.chunk(sequence, length, count)

    def publish(self) -> None:
        """Publish what earlier steps have appended and policies allow. Calls that step, admit or retire do so by themselves.

        Raises
        ------
        InputError
            If the batch has no `reuse`.

        Stream: enqueues one copy and one kernel, if anything is new; see `admit`.
        """
        self._reuse_of("publish")
        try:
            self._publish_due()
        finally:
            self.guard.finish()

    def save_prefixes(self, path: str | os.PathLike[str]) -> int:
        """Write all that is kept, on the device and on the host, to a safetensors file; return its blocks.

        The file takes the place of one of that name, or of the one that a link of that name points to, when all of it is
        written. It holds tokens, K and V of users, and the salts of tenants; only its owner may read it.

        Raises
        ------
        InputError
            If the batch has no `reuse`, or no digest of the weights or of a float8 pool's scales (`ReuseOptions`); if `path` is
            none, is there and is no regular file, or cannot be written.
        CapacityError
            If the host has not enough memory.

        Stream: enqueues copies and waits.
        """
        reuse = self._reuse_of("save_prefixes")
        files, target = reuse.files("save_prefixes"), file_to_write(path)
        self._publish_due()
        with self.guard:
            found = files.collect(reuse.host)
        files.write(target, found)
        return len(found.image.tokens)

    def load_prefixes(self, path: str | os.PathLike[str]) -> int:
        """Keep what a file of `save_prefixes` holds, as far as there is room; return how many of its blocks are there now.

        It goes to the host, if the batch has memory there (`ReuseOptions.host_bytes`), else to the device.

        Raises
        ------
        WeightError
            If the file is damaged, or is no such file.
        InputError
            If another model computed it (configuration, weights, scales, element type, page size, layout), or the batch has no
            `reuse`, or no digest of the weights or of a float8 pool's scales.
        CapacityError
            If the host has not enough memory.

        Stream: enqueues copies and waits.
        """
        reuse = self._reuse_of("load_prefixes")
        files = reuse.files("load_prefixes")
        found = files.read(path)
        self._publish_due()
        with self.guard:
            return files.keep(found, reuse.host)

    def _open_reuse(self, options: ReuseOptions | None, index: int, scrub: str) -> None:
        """Make what the calls of this class need."""
        if options is not None:
            if not isinstance(options, ReuseOptions):
                raise InputError(f"reuse: {options!r} is not a ReuseOptions")
            check_reuse(self.plan, index, scrub, options.future_tokens)
            if options.on_event is not None:
                options = replace(options, on_event=ReuseEvents(options.on_event, self.guard))
            caches = self.resources.cache_managers[index]
            self.reuse = BatchReuse(options, self.stepper, self._placement, caches.kv_cache, caches.kept_states)
            self.stepper.taken_back = self.reuse.contexts.taken_back

    def _close_moves(self) -> None:
        super()._close_moves()
        if self.reuse is not None:
            self.reuse.close()

    def _publish_due(self) -> None:
        # The first part of a call: an error of what follows does not undo it.
        if self.reuse is not None and self.reuse.contexts.due:
            with self.guard.part:
                self.reuse.publishing.publish_due()

    def _reuse_of(self, call: str) -> BatchReuse:
        if self.reuse is None:
            raise InputError(f"{call}: the batch was made without reuse; pass reuse=ReuseOptions() to Batch")
        return self.reuse

    def _named(self, sequence: Any, call: str) -> Sequence:
        self._row_of(sequence, call)
        named: Sequence = sequence
        return named
