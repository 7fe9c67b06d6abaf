"""LoRA targets: the projections of an engine that adapters may change, and which module of an adapter means which.

Knows names and sizes. Does not know files or devices.

Modules of an adapter and targets of an engine need not be cut alike. ::

    adapter            engine
    q_proj   ------->  q_proj
    q_proj   ------->  qkv_proj, columns of its part q_proj       the target says its parts
    qkv_proj ------->  q_proj, k_proj, v_proj                     columns in this order
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from numba_kv.config import LLMEngineConfig
from numba_kv.config.lora_target import LoRATarget
from numba_kv.errors import ConfigError, InputError
from numba_kv.geometry import check_count

__all__ = ["FUSED", "Placement", "TargetTable", "targets_from_config"]

#: Fused projection -> the projections that it is made of, in the order of its columns.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

#: What wrappers put before a language model's own module names. Towers of other modalities are not among them: their
#: layers have the same names and must not be taken for the language model's.
_WRAPPERS = ("model", "language_model", "text_model")
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where columns of an adapter's module go.

    Attributes
    ----------
    target : int
        Number of the target.
    source, column, n : int
        First column in the module's B, first column in the target's B, and how many.
    """

    target: int
    source: int
    column: int
    n: int


class TargetTable:
    """The targets of an engine, found by the names of an adapter's modules.

    Parameters
    ----------
    targets : iterable of LoRATarget
        In the engine's order.

    Raises
    ------
    InputError
        If there is none, or two have the same name or binding.
    """

    def __init__(self, targets: Iterable[LoRATarget]) -> None:
        self.targets = tuple(targets)
        if not self.targets or not all(isinstance(t, LoRATarget) for t in self.targets):
            raise InputError("targets: at least one LoRATarget, and nothing else, is wanted")
        self._whole: dict[str, int] = {}
        self._parts: dict[str, Placement] = {}
        bindings: set[str] = set()
        for number, target in enumerate(self.targets):
            name = _own_name(target.name)
            if name in self._whole or target.a_name in bindings or target.b_name in bindings or target.a_name == target.b_name:
                raise InputError(f"targets: {target.name!r} or one of its bindings is there twice")
            self._whole[name] = number
            bindings |= {target.a_name, target.b_name}
        for number, target in enumerate(self.targets):
            parent, column = _own_name(target.name).rpartition(".")[0], 0
            for part, columns in target.parts:
                name = f"{parent}.{part}" if parent else part
                if name in self._whole or name in self._parts:
                    raise InputError(f"targets: {name!r} is a part of {target.name!r} and somewhere else too")
                self._parts[name] = Placement(target=number, source=0, column=column, n=columns)
                column += columns

    def find(self, module: str) -> tuple[Placement, ...]:
        """Return where the columns of `module` go, in order; empty if the engine has no such target. All go to the same k."""
        name = _own_name(module)
        if name in self._whole:
            number = self._whole[name]
            return (Placement(target=number, source=0, column=0, n=self.targets[number].n),)
        if name in self._parts:
            return (self._parts[name],)
        parent, _, last = name.rpartition(".")
        found, source = [], 0
        for part in FUSED.get(last, ()):
            number = self._whole.get(f"{parent}.{part}" if parent else part, -1)
            if number < 0:
                return ()
            found.append(Placement(target=number, source=source, column=0, n=self.targets[number].n))
            source += self.targets[number].n
        return tuple(found)


def targets_from_config(
    config: LLMEngineConfig,
    *,
    num_attention_heads: int | Sequence[int] | None = None,
    intermediate_size: int | Sequence[int] | None = None,
    fused: bool = False,
    prefix: str = "model.layers",
) -> tuple[LoRATarget, ...]:
    """Return the projections of a usual decoder: q, k, v, o, and, if `intermediate_size` is given, gate, up, down.

    Parameters
    ----------
    config : LLMEngineConfig
        Its layers, which must all be attention layers, and its hidden size.
    num_attention_heads : int or sequence of int
        Query heads, of all layers or of each; the configuration does not hold them.
    intermediate_size : int or sequence of int, optional
        Channels between up and down projection; None: only attention takes adapters.
    fused : bool
        Whether q, k, v and gate, up are one projection each.
    prefix : str
        What stands before the number of a layer in the names.

    Raises
    ------
    ConfigError
        Naming what is not known.

    Layers that borrow KV have neither k nor v.
    """
    if not config.hidden_size:
        raise ConfigError("hidden_size: the configuration does not say it; list the targets as LoRATarget instead")
    if num_attention_heads is None:
        raise ConfigError("num_attention_heads: not given, and the configuration does not hold it; pass it")
    layers = len(config.layers)
    heads = _each("num_attention_heads", num_attention_heads, layers)
    inner = _each("intermediate_size", intermediate_size, layers) if intermediate_size is not None else None
    hidden, found = config.hidden_size, []
    for number, layer in enumerate(config.layers):
        queries, keys = heads[number] * layer.head_dim, layer.num_kv_heads * layer.head_dim
        attention = {"q_proj": queries, **({"k_proj": keys, "v_proj": keys} if layer.owns_kv else {})}
        where = f"{prefix}.{number}.self_attn"
        found += _projections(where, hidden, attention, "qkv_proj" if fused and layer.owns_kv else "")
        found.append(LoRATarget(name=f"{where}.o_proj", k=queries, n=hidden))
        if inner is not None:
            where = f"{prefix}.{number}.mlp"
            wide = {"gate_proj": inner[number], "up_proj": inner[number]}
            found += _projections(where, hidden, wide, "gate_up_proj" if fused else "")
            found.append(LoRATarget(name=f"{where}.down_proj", k=inner[number], n=hidden))
    return tuple(found)


def _projections(where: str, k: int, columns: dict[str, int], fused: str) -> list[LoRATarget]:
    if fused:
        return [LoRATarget(name=f"{where}.{fused}", k=k, n=sum(columns.values()), parts=tuple(columns.items()))]
    return [LoRATarget(name=f"{where}.{name}", k=k, n=n) for name, n in columns.items()]


def _each(name: str, value: int | Sequence[int], layers: int) -> list[int]:
    given = list(value) if isinstance(value, Sequence) else [value] * layers
    if len(given) != layers:
        raise ConfigError(f"{name}: {len(given)} values for {layers} layers")
    try:
        return [check_count(name, number) for number in given]
    except InputError as error:
        raise ConfigError(str(error)) from None


def _own_name(module: str) -> str:
    """Return a module's name without what wrappers put before it."""
    name = module.removeprefix(_PEFT_PREFIX)
    while True:
        first, _, rest = name.partition(".")
        if first not in _WRAPPERS or not rest:
            return name
        name = rest
