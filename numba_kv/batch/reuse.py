"""BatchReuse: joins a batch's rows to the cache of kept prefixes.

The cache decides and counts on the host. Here its decisions become pages of rows, copies and floors (`reuse_admission`), and
the batch's tokens become what is published (`reuse_publishing`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from numba_kv.batch.arguments import num_prompt_tokens
from numba_kv.batch.kept_files import KeptFiles
from numba_kv.batch.kept_host import open_host
from numba_kv.batch.kept_states import KeptStates
from numba_kv.batch.look_ahead import LookAhead
from numba_kv.batch.prompt import Prompt
from numba_kv.batch.reuse_admission import Admission, PrefixAdmission
from numba_kv.batch.reuse_context import SequenceContext
from numba_kv.batch.reuse_contexts import SequenceContexts
from numba_kv.batch.reuse_limits import has_variants
from numba_kv.batch.reuse_publishing import PrefixPublishing
from numba_kv.context.engine_identity import engine_identity, row_identity
from numba_kv.errors import InputError
from numba_kv.geometry import check_count
from numba_kv.ledger.reuse.eviction import Wanted
from numba_kv.ledger.reuse.groups import reuse_groups
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.ledger.reuse.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from numba_kv.batch.placement import RowPlacement
    from numba_kv.batch.stepper import Stepper
    from numba_kv.cache.host_pages import HostPages
    from numba_kv.cache.kv_cache import KVCacheManager
    from numba_kv.context.options import ReuseOptions
    from numba_kv.device import Memory
    from numba_kv.ledger.reuse.content import TokenContent
    from numba_kv.ledger.reuse.events import ReuseFigures
    from numba_kv.ledger.reuse.lease import Lease
    from numba_kv.weights.lora_slots import LoRAAdapter

__all__ = ["BatchReuse"]


class BatchReuse:
    """Keeps prefixes of a batch's sequences and gives them to later ones. Made by `Batch` from its options.

    Attributes
    ----------
    cache : PrefixCache
        What is kept. To be looked at; the batch changes it.
    policy : PublishPolicy
        Of sequences that are admitted without one.
    contexts : SequenceContexts
        What is known of the batch's sequences.
    publishing : PrefixPublishing
        Makes what rows hold kept.
    admission : PrefixAdmission
        Makes what is kept the beginning of rows.
    ahead : LookAhead
        What K and V of a position are computed of.
    host : HostPages or None
        Host memory for what the device gives up.
    """

    def __init__(
        self,
        options: ReuseOptions,
        stepper: Stepper,
        placement: RowPlacement,
        pools: KVCacheManager,
        kept_states: Memory | None,
    ) -> None:
        from numba_kv.kernels.block_names import with_compiled_chain  # compiled when it is imported

        plan, ledger = stepper.plan, stepper.ledger
        self.policy = options.policy
        self._engine = engine_identity(plan.config, options.weights, options.scales)
        self._stepper = stepper
        self._page = plan.config.page_tokens
        self._has_variants = has_variants(plan.config)
        groups = reuse_groups(plan)
        states = KeptStates(stepper, kept_states) if groups.is_recurrent else None
        self.cache = PrefixCache(
            groups,
            pool=ledger.pool if groups.has_full else None,
            window_slots=[(group.usable_pages, group.kept_pages) for group in plan.groups[1:]],
            snapshot_slots=plan.config.kept_states if groups.is_recurrent else 0,
            limits=options.limits,
            naming=with_compiled_chain(options.naming),
            on_event=options.on_event,
        )
        placement.copies.prepare()
        self.host: HostPages | None = None
        if options.host_bytes:  # after all else that takes memory
            self.host = open_host(self.cache, options, stepper, pools, kept_states)
        self._has_digest = bool(options.weights)
        self._lacks_scales = plan.config.kv_cache_dtype == "float8_e4m3" and bool(plan.config.layers) and not options.scales
        self._files = KeptFiles(self.cache, self._engine, stepper, pools, kept_states)
        self.ahead = LookAhead(self._page, options.future_tokens)
        self.contexts = SequenceContexts(ledger, self._page, options.future_tokens)
        self.publishing = PrefixPublishing(self.cache, stepper, placement, self.contexts, states)
        self.admission = PrefixAdmission(self.cache, stepper, placement, states)
        ledger.kept = self if groups.has_full else None

    @property
    def figures(self) -> ReuseFigures:
        """Counts so far: reused tokens, misses by reason, evictions; a copy."""
        figures = self.cache.figures
        return replace(figures, misses=dict(figures.misses or {}))

    # -- files ---------------------------------------------------------------------------------------------------------

    def files(self, call: str) -> KeptFiles:
        """Return what saves and loads.

        Raises
        ------
        InputError
            If nothing would tell whose files they are.
        """
        if not self._has_digest:
            raise InputError(
                f"{call}: a file outlives its process, and nothing but a digest tells the weights that computed it; make the "
                "batch with ReuseOptions(weights=...), a digest of them"
            )
        if self._lacks_scales:
            raise InputError(
                f"{call}: what is stored as float8 means nothing without its scales, and nothing but a digest tells them; make "
                "the batch with ReuseOptions(scales=...), a digest of them"
            )
        return self._files

    def close(self) -> None:
        """Give host memory back. Stream: waits, if there is any."""
        if self.host is not None:
            self.host.close()
            self.host = None

    # -- room ----------------------------------------------------------------------------------------------------------

    @property
    def evictable(self) -> int:
        """Most pages that could become free."""
        full = self.cache.store.full
        return 0 if full is None else full.most_evictable

    def can_free(self, pages: int) -> bool:
        """Return whether so many pages can become free; changes nothing."""
        return self.cache.store.plan_room(Wanted(pages)) is not None

    def free(self, pages: int) -> None:
        """Let so many pages go.

        Raises
        ------
        StateError
            If the stream is being captured.
        """
        self._stepper.check_can_change()
        self.cache.make_room(self._stepper.ledger.pool.free_pages + pages)

    # -- admission -----------------------------------------------------------------------------------------------------

    def read(self, prompt: Any) -> tuple[Prompt, TokenContent]:
        """Return a prompt of token ids, and what its K and V are computed of: its tokens, or those they look ahead at.

        Raises
        ------
        InputError, ShapeError
            If they are no sequence of token ids in host memory, the media do not match them, the policy is none, or the prompt
            does not say what its positions are turned by, where that is not always the same.
        """
        given = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
        policy = self.policy if given.policy is None else given.policy
        if not isinstance(policy, PublishPolicy):
            raise InputError(f"policy: {policy!r} is not a PublishPolicy")
        if given.most_reused is not None:
            check_count("most_reused", given.most_reused, 0)
        num_prompt_tokens(given.tokens)  # says what is wanted, as without reuse
        content = self.ahead.content(given.tokens, given.media)
        row_identity(self._engine, salt=given.salt, rope=given.rope)  # raises if they are no bytes
        if self._has_variants and given.rope is None and (policy.reuse or policy.publish != "none"):
            raise InputError(
                "rope: the model rotates short and long sequences differently, so their K and V cannot be shared; say which "
                'table this one uses, for example rope=b"short" or rope=b"long"'
            )
        return given, content

    def admissions(
        self, read: Items[tuple[Prompt, TokenContent] | None], adapters: Items[LoRAAdapter | None]
    ) -> list[Admission | None]:
        """Return what joins.

        Parameters
        ----------
        read : sequence of (Prompt, TokenContent) or None
            Of `read`; None: only a length is known.
        adapters : sequence of LoRAAdapter or None
            That each computes with.
        """
        found: list[Admission | None] = []
        for pair, adapter in zip(read, adapters, strict=True):
            if pair is None:
                found.append(None)
                continue
            prompt, content = pair
            identity = row_identity(self._engine, adapter=adapter, salt=prompt.salt, rope=prompt.rope)
            identity = self.ahead.identity(identity, prompt.tokens)
            policy = self.policy if prompt.policy is None else prompt.policy
            found.append(Admission(identity, content, policy, prompt.most_reused))
        return found

    def context(self, admission: Admission, lease: Lease) -> SequenceContext:
        """Return what is known of a sequence that was admitted."""
        plan, content = lease.plan, self.ahead.known(admission.content)
        published = plan.reused_tokens // self._page * self._page
        prompt = admission.content.num_tokens - self.ahead.tokens
        return SequenceContext(admission.identity, content, admission.policy, prompt, plan.matched_tokens, published)
