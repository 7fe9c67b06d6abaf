"""StateVerification: the part of MambaCacheManager that verification steps use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba_kv.device.unique import Unique
from numba_kv.errors import InputError, StateError

if TYPE_CHECKING:
    from numba_kv.cache.state_commit import StateCommits
    from numba_kv.kernels.state_commit import CommitStatus
    from numba_kv.plan import MemoryPlan

__all__ = ["StateVerification"]


class StateVerification(Unique):
    """Part of MambaCacheManager: commits after a verification step."""

    plan: MemoryPlan
    _commits: StateCommits

    @property
    def has_commits(self) -> bool:
        """Whether there are states to commit after a verification step."""
        config = self.plan.config
        return config.recurrent_layer is not None and config.max_verify_tokens > 0

    @property
    def has_intermediate_recurrent_states(self) -> bool:
        """Whether a verification step keeps what a commit of recurrent states needs: snapshots or inputs."""
        layer = self.plan.config.recurrent_layer
        return self.has_commits and layer is not None and layer.has_recurrent_state

    @property
    def has_intermediate_conv_states(self) -> bool:
        """Whether a verification step keeps snapshots of convolution states."""
        return self.plan.config.has_conv_snapshots

    @property
    def uses_replay(self) -> bool:
        """Whether commits replay the inputs of accepted tokens."""
        return self.has_intermediate_recurrent_states and self.plan.config.recurrent_spec_verify_mode == "replay"

    @property
    def commit_launches(self) -> int:
        """Kernels of a commit."""
        return self._commits.num_launches

    def prepare_commits(self, accept_len: Any = None, state_index: Any = None, node_ids: Any = None) -> None:
        """Compile what commits need, so that the first one can be part of a capture.

        Parameters
        ----------
        accept_len, state_index, node_ids : optional
            Of a commit that will be captured, as it will be given them: then nothing is left to be bound in the capture.

        Raises
        ------
        ShapeError, InteropError, StateError
            As `scatter_accepted_linear_states`.

        Stream: host only. Cost: seconds, the first time on a machine.
        """
        self._commits.prepare(accept_len, state_index, node_ids)

    def reshape_intermediate_states(self, num_rows: int, num_tokens: int) -> None:
        """Say how the next verification step packs its snapshots or inputs: ``[num_rows, num_tokens, ...]``.

        Raises
        ------
        InputError
            If there are more rows than `max_batch_size`, or more tokens than `max_verify_tokens`.
        StateError
            If the plan has no verification.

        Stream: host only. A captured commit keeps the numbers that it was captured with.
        """
        self._commits.reshape_intermediate_states(num_rows, num_tokens)

    def scatter_accepted_linear_states(self, accept_len: Any, state_index: Any, *, stream: object | None = None) -> None:
        """Commit the first accepted tokens of each row: of recurrent and convolution states, in all layers.

        Parameters
        ----------
        accept_len : int32 array [rows]
            Accepted tokens of each row, on the device: 0 to the tokens of the step. 0 leaves the states as they were before it.
        state_index : int32 array [rows]
            Slot of each row (`StepView.state_index`); -1: the row has none and is left out.
        stream : optional
            The device's own, or one that is being captured.

        Raises
        ------
        ShapeError, InteropError
            If an array is not dense int32 of enough elements on the device.
        StateError
            If the plan has no verification.

        Notes
        -----
        What only the device knows is refused there, row by row: see `commit_refusals`. Rows that accept nothing keep their
        states, bit by bit; so do those that are refused, except that convolution states with room for drafts still hold them.

        Stream: enqueues `commit_launches` kernels, three at most. Cost: no allocation.
        """
        self._commits.commit(accept_len, state_index, None, stream)

    def scatter_accepted_tree_states(
        self, node_ids: Any, accept_len: Any, state_index: Any, *, stream: object | None = None
    ) -> None:
        """Commit the accepted path of each row through a tree of drafts.

        Parameters
        ----------
        node_ids : int32 array [rows, A]
            Accepted nodes from the root on, A at most the nodes of the tree. -1 within the accepted length is padding: every
            commit leaves it out and goes on with the next id.
        accept_len, state_index, stream
            As in `scatter_accepted_linear_states`; lengths are 0 to A.

        Raises
        ------
        ShapeError, InteropError, StateError
            As `scatter_accepted_linear_states`.

        Notes
        -----
        A row is refused if an id names no node or is there twice and, where convolution states have room for drafts, if ids do
        not ascend (parents come before their children).
        """
        if node_ids is None:
            raise InputError("node_ids: None given; scatter_accepted_linear_states commits without a tree")
        self._commits.commit(accept_len, state_index, node_ids, stream)

    def replay_commit_accepted_tree_states(
        self, node_ids: Any, accept_len: Any, state_index: Any, *, stream: object | None = None
    ) -> None:
        """Commit a path by replaying its inputs: `scatter_accepted_tree_states`, but only in replay mode.

        Raises
        ------
        StateError
            In snapshot mode: the stash that would be read was never written.
        """
        if not self.uses_replay:
            raise StateError("the plan keeps snapshots, no inputs to replay; plan with recurrent_spec_verify_mode='replay'")
        self.scatter_accepted_tree_states(node_ids, accept_len, state_index, stream=stream)

    def commit_refusals(self) -> dict[int, CommitStatus]:
        """Return the rows of which the device refused a commit since the last call, and why; their words are cleared.

        Stream: waits.
        """
        return self._commits.refusals()
