"""SpeculativeBatch: base and draft in rounds of proposals, verification and commit.

A round, with n tokens of a row in both models::

    draft_step  k times      draft   n + k
    verify_step              base    n + k + 1          the last kept token and the proposals
    commit(accepted)         base    n + accepted       K, V, states and lengths, in one call
                             draft   n + accepted or less: `catch_up` appends what it lacks
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_kv.batch.catch_up import CatchUp
from numba_kv.batch.hostless_rounds import HostlessRounds
from numba_kv.batch.round_arguments import accepted_array, node_array, parents_of, told_counts, told_paths
from numba_kv.batch.round_launches import RoundLaunches
from numba_kv.batch.sequence import Sequence
from numba_kv.batch.view import StepView
from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import ConfigError, InputError, StateError
from numba_kv.shared_resources import SharedResources

__all__ = ["SpeculativeBatch"]


class SpeculativeBatch(HostlessRounds):
    """Takes over the tables of a base and its draft and serves sequences with both. `close` gives them back.

    Parameters
    ----------
    resources : SharedResources
        From `create_for_spec_decode`. Borrowed; must stay open as long as the batch is used.
    keep_drafts : bool, optional
        Whether the draft keeps K and V of proposals that were accepted. If not, it computes accepted tokens anew, from what the
        base says about them, as EAGLE, MTP and block drafts do: `catch_up` makes room for them. Default: for chains.
    catch_up_tokens : int, optional
        Places of a row in `catch_up`. Default: the most that it lacks if the draft makes all its steps in every round.
    scrub : str
        As `Batch` has it, in both models.

    Attributes
    ----------
    base : Batch
        The base's part: tables, figures, what reads. Calls that change rows or lengths are refused: the draft has to follow.
    draft : Batch or None
        The draft's part, to be read as well; None if the draft reads the base's K and V.
    spec : SpecDecodeConfig
        The numbers of a round.
    keeps_drafts : bool
        As above.

    Raises
    ------
    InputError, StateError, CapacityError
        As `Batch`, or if `resources` were made without a draft.
    ConfigError
        If a tree's draft is to keep its proposals: they are not in the order of a path.

    Notes
    -----
    Every call that raises an error of this library has changed nothing. What only the device knows is refused there, row by
    row: the row stays as it was, in both models, and `refusals` says why.
    """

    def __init__(
        self,
        resources: SharedResources,
        *,
        keep_drafts: bool | None = None,
        catch_up_tokens: int | None = None,
        scrub: str = "never",
    ) -> None:
        super().__init__(resources, scrub=scrub)
        with self._or_close():
            spec = resources.deployment.spec
            if spec is None:
                raise StateError("SpeculativeBatch: there is no draft")
            is_chain = not (spec.is_tree or spec.proposes_blocks)
            if keep_drafts is not None and not isinstance(keep_drafts, bool):
                raise InputError(f"keep_drafts: {keep_drafts!r} is not True, False or None")
            if keep_drafts and not is_chain:
                raise ConfigError(f"keep_drafts: True, but {spec.mode!r} proposes trees or blocks; only a chain can be kept")
            self.spec = spec
            self.keeps_drafts = is_chain if keep_drafts is None else keep_drafts
            caches, take = resources.cache_managers, resources.taker(0)
            draft = None if self.draft is None else caches[1].step_buffers
            self._states = caches[0].mamba_cache
            self._most = self._most_verified()
            with resources.device.active():
                self.rounds = self.base.rounds = RoundLaunches(caches[0], draft, self._most, self.keeps_drafts, take)
                if self.draft is not None:
                    width = self._checked_width(catch_up_tokens)
                    self._catch_up = CatchUp(caches[0].step_buffers, self.draft.stepper, width, resources.taker(1))
        self._verified: NDArray[np.int64] | None = None  # tokens of each row in the step that waits for its commit
        self._parents: Tensor | None = None
        self._trees: dict[tuple[int, ...], Tensor] = {}

    def __enter__(self) -> SpeculativeBatch:
        self.guard.check_open()
        return self

    def __repr__(self) -> str:
        rows = self.base.plan.config.max_batch_size
        return f"SpeculativeBatch({len(self.base.sequences)} of {rows} rows, {self.spec.mode})"

    # -- verification --------------------------------------------------------------------------------------------

    def tree(self, parents: Iterable[int]) -> Tensor:
        """Return a tree that every row verifies, on the device: int32 [B, nodes]. It is kept until the resources are closed.

        Parameters
        ----------
        parents : iterable of int
            The parent of each node, which comes before it; -1 for node 0, the root: the last kept token.

        Raises
        ------
        InputError
            If it is no tree of at most `verify_tokens` nodes.

        Stream: the first call with a tree allocates, and waits.
        """
        with self.guard:
            found = parents_of(parents, self._most)
            if found not in self._trees:
                rows = self.base.plan.config.max_batch_size
                name = f"round.tree.{'.'.join(map(str, found[1:]))}"
                memory = self.resources.take_once(name, 4 * rows * len(found))
                made = Tensor(memory, self.resources.device, dtype("int32"), (rows, len(found)))
                made.fill_from(np.tile(np.array(found, np.int32), (rows, 1)))
                self.rounds.prepare_tree(made)
                self._trees[found] = made
            return self._trees[found]

    def verify_step(self, tokens: int | Mapping[Sequence, int] | None = None, *, tree: Any = None) -> StepView:
        """Append a verification step to the base: the last kept token of each row and its proposals.

        Parameters
        ----------
        tokens : int or mapping of Sequence to int, optional
            Tokens of every sequence, or of those named, the last kept one included; default `verify_tokens`. With recurrent
            layers all that are named have as many.
        tree : int32 device array [B, nodes], optional
            Instead: the parent of each node (-1: the root, or padding), of `SpeculativeBatch.tree` or from a draft on the
            device. Positions then follow the depth of nodes, not their place.

        Returns
        -------
        StepView
            What the base's forward pass reads. It leaves recurrent states alone, and writes what a commit needs
            (`MambaCacheManager.state`, packed ``[B, tokens, ...]``).

        Raises
        ------
        InputError, ShapeError, InteropError
            If both are given, or more tokens than a round verifies.
        StateError, CapacityError
            As `Batch.step`, or if the last verification step is not committed.

        Stream: as `Batch.step`; with a tree one kernel more. Cost: as `Batch.step`.
        """
        with self.guard:
            self._check_committed("verify_step")
            self._check_members()
            parents = None if tree is None else self._checked_tree(tokens, tree)
            asked = tokens if parents is None else parents.shape[1]
            asked = self.spec.verify_tokens if asked is None else asked
            counts = self._step_counts(asked)
            self._check_verified(counts)
            if parents is not None:
                self.rounds.prepare_tree(parents)  # what can fail comes before the step
            view = self.base.step(asked)
            self._pack_states(int(counts.max()))
            if parents is not None:
                self.guard.is_enqueueing = True
                self.rounds.place_nodes(parents, self.resources.stream)
            self._verified, self._committed, self._parents = counts, None, parents
            return view

    def commit(self, accepted: Any, nodes: Any = None) -> None:
        """Keep what was accepted of the verification step, and take the rest back, in both models.

        K and V of a path move together, recurrent states become those behind its last token, and both models have the length
        that follows: the base n + accepted, the draft at most as much (`keeps_drafts`), or n.

        Parameters
        ----------
        accepted : int32 device array [B], or mapping of Sequence to (int or sequence of int)
            Tokens of each row that are kept, 0 to all; entries of rows that were not verified are not read. Or, from the host,
            of each verified sequence, the same number or, after a tree, the ids of the path.
        nodes : int32 device array [B, A], optional
            Ids of each row's path from the root on, of which the first `accepted` count; they rise, as a parent comes before
            its children. -1 among them is left out, and not counted, by everything that is committed. Wanted after a tree.

        Raises
        ------
        InputError, ShapeError, InteropError
            If an array is of another kind or place; if what the host says is negative, above the tokens of the step, or no
            path.
        StateError
            If no verification step waits for a commit.

        Notes
        -----
        What the device is given it checks itself. A row with a count or a path that cannot be is left as it is, in both models
        and in every layer; `refusals` names it, and then it can be committed again. So are paths of the host through a tree
        that is not of `SpeculativeBatch.tree`: the host does not know its parents, and knows lengths within bounds afterwards.

        Stream: enqueues one kernel; after a tree one more and one for each slab; with recurrent layers one and those of
        `MambaCacheManager.scatter_accepted_linear_states`. What the host says is one copy. Cost: no allocation, no wait.
        """
        with self.guard:
            if self._verified is None:
                raise StateError("commit: no verification step waits for it; verify_step() first")
            self._check_members()
            told = paths = None
            is_sure = False  # the device cannot but do what the host says
            counts, place = self._verified, self.resources.device
            if isinstance(accepted, Mapping):
                told, paths, is_sure = self._told(accepted, nodes, counts)
            else:
                accepted = accepted_array(place, len(counts), accepted)
                if nodes is not None:
                    nodes = node_array(place, "nodes", len(counts), int(counts.max()), nodes)
                elif self._parents is not None:
                    raise InputError("nodes: None given, but a tree was verified; the ids of each row's path are wanted")
            self._pack_states(int(counts.max()))  # a capture in between may have said otherwise
            with ExitStack() as guards:
                for batch in self._members:
                    guards.enter_context(batch.guard)
                    if told is None:
                        batch.stepper.start_work()  # changes lengths within bounds: a run of even steps goes on
                    else:
                        batch.stepper.start_copies()
                if told is not None:
                    accepted, nodes = self.rounds.tell(told, paths)
                self.base.stepper.stats.launches += self.rounds.commit(accepted, nodes, self._parents, place.stream)
                self._note_commit(counts, told if is_sure else None)
            self._verified, self._committed, self._drafted = None, counts, 0

    # -- notes ---------------------------------------------------------------------------------------------------

    def _told(
        self, accepted: Mapping[Sequence, Any], nodes: Any, counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32] | None, bool]:
        """Return counts by row, and paths, as the host says them; and whether it knows that they can be."""
        if nodes is not None:
            raise InputError("nodes: given beside a mapping; map each sequence to the ids of its path instead")
        rows = self.base._sequences
        if self._parents is None and not any(hasattr(value, "__iter__") for value in accepted.values()):
            return told_counts(accepted, rows, counts), None, True
        known = next((parents for parents, tensor in self._trees.items() if tensor is self._parents), None)
        found, paths = told_paths(accepted, rows, counts, known)
        return found, paths, self._parents is None or known is not None

    def _note_commit(self, counts: NDArray[np.int64], told: NDArray[np.int32] | None) -> None:
        """Follow the lengths of both models: exactly, if the host decided and knew them."""
        steppers = [batch.stepper for batch in self._members]
        base = steppers[0].ledger
        if told is None or not all(stepper.ledger.is_exact for stepper in steppers):
            lowest = np.maximum(base.lo - counts, 0)
            for stepper in steppers:
                stepper.note_bounds(lowest)
            return
        for row in np.flatnonzero(base.live).tolist():
            before = int(base.lo[row] - counts[row])
            kept = before + int(told[row])
            targets = [kept, kept if self.keeps_drafts else before]
            for stepper, target in zip(steppers, targets, strict=False):
                if target < stepper.ledger.lo[row]:
                    stepper.ledger.note_rewind(row, target)

    def _commit_again(self, rows: list[int]) -> None:
        if self._verified is None and self._committed is not None:
            waiting = self.base._buffers.appended.to_host()[0, rows]  # 0 of a row whose refusal is an older round's
            again = np.zeros_like(self._committed)
            again[rows] = np.where(waiting == self._committed[rows], waiting, 0)
            self._verified = again if again.any() else None

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_committed(self, call: str) -> None:
        if self._verified is not None:
            raise StateError(f"{call}: the last verification step is not committed; commit() first")

    def _check_verified(self, counts: NDArray[np.int64]) -> None:
        longest = int(counts.max(initial=0))
        if longest > self._most:
            raise InputError(f"tokens: {longest} of a row, at most {self._most} can be verified and taken back in a step")
        if self.base.plan.config.num_recurrent_layers and np.any((counts > 0) & (counts < longest)):
            raise InputError("tokens: they differ, but recurrent layers keep as many of each row; verify in several rounds")

    def _checked_tree(self, tokens: Any, tree: Any) -> Tensor:
        if tokens is not None:
            raise InputError("tokens: given beside a tree, whose nodes are counted")
        return node_array(self.resources.device, "tree", self.base.plan.config.max_batch_size, self._most, tree)

    def _most_verified(self) -> int:
        """Return the tokens of a row that a step can verify: as many as can be taken back, and committed."""
        config = self.base.plan.config
        most = config.max_step_tokens
        return min(most, config.max_verify_tokens) if config.num_recurrent_layers else most
