"""Recurrent layers: what one sequence keeps in them, whatever its length.

Knows four kinds: Mamba-1 and Mamba-2 (selective state spaces) and the gated delta net, each with a state that every token
updates and the last inputs of a short causal convolution, and the convolution alone. ::

    state          [H, D, S]     H heads of D x S numbers
    convolution    [C, columns]  the last inputs of C channels, newest last; a token reads conv_kernel - 1 of them

Does not know files or memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from numba_kv.config.read import show
from numba_kv.dtypes import DType, dtype
from numba_kv.errors import ConfigError
from numba_kv.geometry import INT32_MAX

__all__ = [
    "LAYER_TYPES",
    "STATE_DTYPES",
    "VERIFY_MODES",
    "GatedDeltaNetLayer",
    "Mamba1Layer",
    "Mamba2Layer",
    "RecurrentLayer",
    "ShortConvLayer",
    "check_layer_types",
    "check_state_dtype",
]

#: Element types of states. A state is read and written as what it is, and computed in float32.
STATE_DTYPES = ("float32", "float16", "bfloat16")
#: What a decoder layer keeps: KV, a state, both (heads side by side), or nothing (an MLP that counts as a layer).
LAYER_TYPES = ("attention", "recurrent", "both", "none")
#: How a verification step keeps what its commit needs: the state behind each token, or what computes it anew.
VERIFY_MODES = ("snapshot", "replay")


def check_state_dtype(argument: str, name: object) -> str:
    """Return the project's name of the element type `name`, if states can have it; `argument` is for messages.

    Raises
    ------
    ConfigError
        Otherwise.
    """
    try:
        found = dtype(name).name if isinstance(name, (str, DType)) else ""
    except ConfigError:
        found = ""
    if found not in STATE_DTYPES:
        raise ConfigError(f"{argument}: {show(name)} is not one of {', '.join(STATE_DTYPES)}")
    return found


@dataclass(frozen=True, kw_only=True)
class RecurrentLayer:
    """A recurrent layer as far as its states are concerned. Made as one of its kinds.

    Attributes
    ----------
    num_heads : int
        H, heads of the state.
    head_dim : int
        D, rows of a head's state.
    state_size : int
        S, columns of a head's state.
    conv_dim : int
        C, channels of the convolution.
    conv_kernel : int
        Tokens that one output of the convolution reads, its own included.
    recurrent_state_dtype, conv_state_dtype : str
        Element types: float32, float16 or bfloat16.
    """

    num_heads: int
    head_dim: int
    state_size: int
    conv_dim: int
    conv_kernel: int
    recurrent_state_dtype: str = "float32"
    conv_state_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if type(self) is RecurrentLayer:
            raise ConfigError("RecurrentLayer: make a Mamba1Layer, a Mamba2Layer, a GatedDeltaNetLayer or a ShortConvLayer")
        of_state = ("num_heads", "head_dim", "state_size") if self.has_recurrent_state else ()
        for name in (*of_state, "conv_dim", "conv_kernel", *self.own_counts):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= INT32_MAX:
                raise ConfigError(f"{name}: {show(value)} is not an integer from 1 to {INT32_MAX}")
        for name in ("recurrent_state_dtype", "conv_state_dtype"):
            object.__setattr__(self, name, check_state_dtype(name, getattr(self, name)))

    @property
    def has_recurrent_state(self) -> bool:
        """Whether there is a state beside the convolution."""
        return True

    @property
    def own_counts(self) -> tuple[str, ...]:
        """Names of the counts that only this kind has."""
        return ()

    @property
    def can_replay(self) -> bool:
        """Whether accepted tokens can be replayed from a stash of their inputs."""
        return False

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one sequence's state: [H, D, S], zeros if there is none."""
        return self.num_heads, self.head_dim, self.state_size

    def conv_shape(self, room: int = 1) -> tuple[int, int]:
        """Return the shape of one sequence's convolution state with `room` columns beyond those that the next token reads."""
        return self.conv_dim, self.conv_kernel - 1 + room


@dataclass(frozen=True, kw_only=True)
class Mamba1Layer(RecurrentLayer):
    """Mamba-1: every channel has a decay of its own for each column, so there is one head, whose rows are the channels.

    Its inputs cannot be stashed for a replay: the decays of a token are as large as the state.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads != 1:
            raise ConfigError(f"num_heads: {self.num_heads} is not 1; Mamba-1 has channels (head_dim) and no heads")


@dataclass(frozen=True, kw_only=True)
class Mamba2Layer(RecurrentLayer):
    """Mamba-2: one decay a head and token. The state is H heads of channels (D) x state size (S).

    Attributes
    ----------
    num_groups : int
        G: heads of B and C, each for H / G heads of the state.
    """

    num_groups: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_groups:
            raise ConfigError(f"num_groups: {self.num_groups} does not divide num_heads {self.num_heads}")

    @property
    def own_counts(self) -> tuple[str, ...]:
        """Names of the counts that only this kind has."""
        return ("num_groups",)

    @property
    def can_replay(self) -> bool:
        """Whether accepted tokens can be replayed from a stash of their inputs."""
        return True


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetLayer(RecurrentLayer):
    """Gated delta net: the state of each value head maps keys (D) to values (S).

    Attributes
    ----------
    num_key_heads : int
        Heads of queries and keys, each for H / num_key_heads value heads.
    """

    num_key_heads: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_key_heads:
            raise ConfigError(f"num_key_heads: {self.num_key_heads} does not divide num_heads {self.num_heads}")

    @property
    def own_counts(self) -> tuple[str, ...]:
        """Names of the counts that only this kind has."""
        return ("num_key_heads",)

    @property
    def can_replay(self) -> bool:
        """Whether accepted tokens can be replayed from a stash of their inputs."""
        return True


@dataclass(frozen=True, kw_only=True)
class ShortConvLayer(RecurrentLayer):
    """A convolution alone: what the next token reads of a sequence is its last inputs, and nothing else."""

    num_heads: int = field(default=0, init=False, repr=False)
    head_dim: int = field(default=0, init=False, repr=False)
    state_size: int = field(default=0, init=False, repr=False)
    recurrent_state_dtype: str = field(default="float32", init=False, repr=False)

    @property
    def has_recurrent_state(self) -> bool:
        """Whether there is a state beside the convolution."""
        return False


def check_layer_types(types: object, attention_layers: int, recurrent: RecurrentLayer | None) -> None:
    """Refuse a list of decoder layers that disagrees with the layers it counts; an empty one stands for attention alone.

    Raises
    ------
    ConfigError
        Naming the entry, or both counts.
    """
    if recurrent is not None and not isinstance(recurrent, RecurrentLayer):
        raise ConfigError(f"recurrent_layer: {show(recurrent)} is not a RecurrentLayer")
    if not isinstance(types, tuple):
        raise ConfigError(f"layer_types: {show(types)} is not a tuple")
    for index, name in enumerate(types):
        if name not in LAYER_TYPES:
            raise ConfigError(f"layer_types[{index}]: {show(name)} is not one of {', '.join(LAYER_TYPES)}")
    attention = sum(name in ("attention", "both") for name in types) if types else attention_layers
    if attention != attention_layers:
        raise ConfigError(f"layer_types: {attention} layers have attention, but layers has {attention_layers}")
    states = sum(name in ("recurrent", "both") for name in types)
    if bool(states) != (recurrent is not None):
        stated = "missing" if recurrent is None else "given"
        raise ConfigError(f"recurrent_layer: {stated}, but layer_types has {states} recurrent layers")
