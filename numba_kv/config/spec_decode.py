"""How drafts are made and verified: the mode of a speculative pair and the numbers of a round.

A round proposes tokens with the draft, verifies them in one step of the base, and keeps those that the base agrees with. ::

    draft     t1 t2 .. tk            a chain, the nodes of a tree (top_k > 1), or a block at once
    verify    t0 t1 t2 .. tk         one step of the base: the last token that was kept, and what it verifies
    commit    t0 t1 t2               what is kept; the rest is taken back in both models

Knows the rules that concern these numbers alone. Does not know the models: see `DeploymentConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from numba_kv.config.engine import check_int
from numba_kv.config.read import show
from numba_kv.errors import ConfigError
from numba_kv.geometry import INT32_MAX

__all__ = ["BLOCK_MODES", "CHAIN_MODES", "SPEC_MODES", "SpecDecodeConfig"]

#: Modes whose draft runs one step after the other.
CHAIN_MODES = ("eagle3", "mtp", "gemma4_mtp")
#: Modes whose draft proposes a block in one step.
BLOCK_MODES = ("dflash", "jetspec", "dspark")
#: Every mode, under the names of the reference.
SPEC_MODES = ("mtp", "eagle3", "dflash", "jetspec", "dspark", "gemma4_mtp")


@dataclass(frozen=True, kw_only=True)
class SpecDecodeConfig:
    """A speculative mode and the numbers of one round.

    Attributes
    ----------
    mode : str
        "eagle3", "mtp", "dflash", "jetspec" (the same rules as "dflash"), "dspark" or "gemma4_mtp" (the draft reads the base's
        KV and has none of its own).
    top_k : int
        Branches of a node; 1: a chain.
    steps : int
        Steps that the draft runs in a round; 1 where it proposes a block at once.
    verify_tokens : int
        Tokens, or nodes of a tree, of a row in a verification step, the last kept one included. 0 takes `steps` + 1 for a
        chain and `block_size` for a block that is verified as it is; a tree states its size.
    block_size : int
        Tokens of a block; 0 where the draft makes none.
    max_verify_tokens, max_draft_tokens : int
        Widths for which the engines of base and draft were built; 0 takes what a round needs.
    target_layers : tuple of int
        Decoder layers of the base whose hidden states the draft reads.
    base_hidden_size : int
        Channels of what the base hands to the draft; 0: not stated.
    target_kv_layers : tuple of int
        Of "gemma4_mtp": for each attention layer of the draft, the base's attention layer whose KV it reads.
    drafts_fan_out : bool
        Whether one step of the draft makes all branches, so that the branches of a step take no room of their own.
    samples_from_anchor : bool
        Of "dspark": whether the first proposal comes from the last kept token; if not, a block has one token more.
    has_sps_scheduler : bool
        Of "dspark": whether the number of tokens to verify is scheduled by speed.
    confidence_threshold : float
        Of "dspark": proposals below this confidence are not verified; 0 to 1.
    has_reference_limits : bool
        Whether the sizes must be those that kernels of TensorRT Edge-LLM can do (`top_k` up to 8, trees up to 128 nodes, and
        so on). The caches do not need it; False is for engines of your own.

    Raises
    ------
    ConfigError
        If a number is out of range, or numbers disagree.
    """

    mode: str
    top_k: int = 1
    steps: int = 1
    verify_tokens: int = 0
    block_size: int = 0
    max_verify_tokens: int = 0
    max_draft_tokens: int = 0
    target_layers: tuple[int, ...] = ()
    base_hidden_size: int = 0
    target_kv_layers: tuple[int, ...] = ()
    drafts_fan_out: bool = False
    samples_from_anchor: bool = True
    has_sps_scheduler: bool = False
    confidence_threshold: float = 0.0
    has_reference_limits: bool = True

    def __post_init__(self) -> None:
        if self.mode not in SPEC_MODES:
            raise ConfigError(f"mode: {show(self.mode)} is not one of {', '.join(SPEC_MODES)}")
        for name in ("top_k", "steps"):
            check_int(name, getattr(self, name), 1, INT32_MAX)
        for name in ("verify_tokens", "block_size", "max_verify_tokens", "max_draft_tokens", "base_hidden_size"):
            check_int(name, getattr(self, name), 0, INT32_MAX)
        for name in ("drafts_fan_out", "samples_from_anchor", "has_sps_scheduler", "has_reference_limits"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: {show(getattr(self, name))} is not True or False")
        threshold = self.confidence_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not isfinite(threshold):
            raise ConfigError(f"confidence_threshold: {show(threshold)} is not a number")
        if not 0 <= threshold <= 1:
            raise ConfigError(f"confidence_threshold: {threshold} is not in 0..1")
        self._check_layers()
        self._check_block()
        self._resolve()
        self._check_widths()
        self._check_round()
        if self.has_reference_limits:
            self._check_reference_limits()

    # -- what a round takes --------------------------------------------------------------------------------------

    @property
    def proposes_blocks(self) -> bool:
        """Whether the draft proposes a block in one step."""
        return self.mode in BLOCK_MODES

    @property
    def shares_target_kv(self) -> bool:
        """Whether the draft reads the base's KV and stores none."""
        return self.mode == "gemma4_mtp"

    @property
    def is_tree(self) -> bool:
        """Whether what is verified branches."""
        return self.top_k > 1

    @property
    def draft_tokens(self) -> int:
        """Most tokens that a round appends to the draft's rows beyond those that are kept."""
        if not self.proposes_blocks:
            return self._drafted_nodes
        return self.block_size + (self.mode == "dspark" and not self.samples_from_anchor)

    @property
    def _drafted_nodes(self) -> int:
        """Nodes that the draft's steps make; 0 where "dflash" and its like take them from one block."""
        if self.mode in ("dflash", "jetspec"):
            return 0
        return self.steps * (1 if self.drafts_fan_out else self.top_k)

    @property
    def max_accepted_tokens(self) -> int:
        """Most tokens that a round keeps, that of the base itself included."""
        if self.mode == "dspark":
            return self.verify_tokens
        return min(self.verify_tokens, self.block_size) if self.proposes_blocks else self.steps + 1

    @property
    def max_proposal_tokens(self) -> int:
        """The larger width of both engines: what scratch memory for proposals is sized by."""
        return max(self.max_draft_tokens, self.verify_tokens)

    @property
    def verify_state_tokens(self) -> int:
        """Tokens of a verification step from which the states of recurrent layers in the base are committed.

        The reference keeps none beside "eagle3" and "gemma4_mtp", so that a base with recurrent layers cannot commit there;
        here it can.
        """
        if self.mode in ("dflash", "jetspec"):
            return self.verify_tokens if self.is_tree else self.block_size
        return self.max_verify_tokens

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_layers(self) -> None:
        for name in ("target_layers", "target_kv_layers"):
            layers = getattr(self, name)
            if not isinstance(layers, tuple):
                raise ConfigError(f"{name}: {show(layers)} is not a tuple of layer numbers")
            for place, layer in enumerate(layers):
                check_int(f"{name}[{place}]", layer, 0, INT32_MAX)
        if len(set(self.target_layers)) != len(self.target_layers):
            raise ConfigError(f"target_layers: {show(self.target_layers)} names a layer twice")
        needs_layers = self.proposes_blocks or self.mode == "eagle3"
        if needs_layers and not self.target_layers:
            raise ConfigError(f"target_layers: empty; {self.mode!r} reads hidden states of at least one layer of the base")
        if self.target_kv_layers and not self.shares_target_kv:
            raise ConfigError(f"target_kv_layers: given, but a draft of {self.mode!r} has KV of its own")

    def _check_block(self) -> None:
        if not self.proposes_blocks:
            if self.block_size:
                raise ConfigError(f"block_size: {self.block_size} given, but {self.mode!r} drafts step by step; leave it 0")
            return
        least = 1 if self.mode == "dspark" else 2
        if self.block_size < least:
            raise ConfigError(f"block_size: {self.block_size} is not {least} or more, which {self.mode!r} requires")
        if self.mode != "dspark" and self.steps != 1:
            raise ConfigError(f"steps: {self.steps} is not 1; a draft of {self.mode!r} proposes its block in one step")

    def _resolve(self) -> None:
        """Fill in what follows from the rest."""
        if not self.verify_tokens:
            if self.is_tree:
                raise ConfigError("verify_tokens: 0; a tree (top_k above 1) states how many nodes are verified")
            whole = self.block_size + 1 if self.mode == "dspark" else self.block_size
            object.__setattr__(self, "verify_tokens", whole if self.proposes_blocks else self.steps + 1)
        widths = {"max_verify_tokens": self.verify_tokens, "max_draft_tokens": max(self.block_size, self._drafted_nodes)}
        for name, needed in widths.items():
            if not getattr(self, name):
                object.__setattr__(self, name, needed)

    def _check_widths(self) -> None:
        if self.verify_tokens > self.max_verify_tokens:
            raise ConfigError(
                f"verify_tokens: {self.verify_tokens} is above max_verify_tokens {self.max_verify_tokens}, the base's width"
            )
        if self.block_size > self.max_draft_tokens:
            raise ConfigError(
                f"block_size: {self.block_size} is above max_draft_tokens {self.max_draft_tokens}, the width of the draft"
            )
        if self._drafted_nodes > self.max_draft_tokens:
            branches = "" if self.drafts_fan_out else f" x top_k {self.top_k}"
            raise ConfigError(f"steps: {self.steps}{branches} is above max_draft_tokens {self.max_draft_tokens}, its width")

    def _check_round(self) -> None:
        mode, verify = self.mode, self.verify_tokens
        if self.is_tree and self.top_k >= verify and mode not in ("eagle3", "dspark"):
            raise ConfigError(f"top_k: {self.top_k} is not below verify_tokens {verify}; a root and its branches are verified")
        if not self.is_tree and mode in ("dflash", "jetspec") and verify != self.block_size:
            raise ConfigError(f"verify_tokens: {verify} is not block_size {self.block_size}, a whole block; leave it 0")
        if not self.is_tree and mode in ("mtp", "gemma4_mtp") and verify != self.steps + 1:
            raise ConfigError(f"verify_tokens: {verify} is not steps + 1, which is {self.steps + 1}; leave it 0")
        if mode != "dspark":
            for name in ("has_sps_scheduler", "confidence_threshold"):
                if getattr(self, name):
                    raise ConfigError(f"{name}: {getattr(self, name)} given, but only 'dspark' has it")
        elif self.is_tree:
            if self.has_sps_scheduler:
                raise ConfigError("has_sps_scheduler: True, but a tree is not scheduled; use top_k 1")
            if self.confidence_threshold >= 1:
                raise ConfigError("confidence_threshold: 1 leaves a tree without proposals; take less")
        elif not 2 <= verify <= self.block_size + 1:
            raise ConfigError(f"verify_tokens: {verify} is not in 2..{self.block_size + 1} (block_size + 1)")

    def _check_reference_limits(self) -> None:
        for name, value, most in self._reference_limits():
            if value > most:
                raise ConfigError(
                    f"{name} is {value}, at most {most} with kernels of TensorRT Edge-LLM in mode {self.mode!r}; "
                    "has_reference_limits=False lifts it"
                )

    def _reference_limits(self) -> Iterator[tuple[str, int, int]]:
        """Yield what is limited, what it is, and the most it may be."""
        verify, block, tree = self.verify_tokens, self.block_size, self.is_tree
        if self.mode in ("dflash", "jetspec", "mtp", "gemma4_mtp") and tree:
            yield "top_k", self.top_k, 8
            yield "verify_tokens", verify, 128
        if self.mode in ("dflash", "jetspec") and tree:
            yield "the smaller of block_size and verify_tokens", min(block, verify), 32
        if self.mode == "mtp" or (self.mode == "gemma4_mtp" and tree):
            yield "steps", self.steps, 15
        if self.mode == "dspark" and tree:
            yield "the smaller of block_size + 1 and verify_tokens", min(block + 1, verify), 16
        elif self.mode == "dspark":
            yield "verify_tokens", verify, 17
