"""Attention over pages as transformers calls it: a function and a mask function under one name, and who chooses them.

A model attends over pages only while a forward with such a cache runs: the name is put into its configuration when its decoder
begins and taken out when it ends. So the same model runs with any other cache in between.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from numba_kv.adapters.transformers_paged import StoredKV
from numba_kv.errors import InputError, StateError, UnsupportedModelError

__all__ = ["AttentionChoice", "attend_pages", "attend_traced", "chooses_by_name", "mask_of_pages"]

#: Without a mask function, a name makes transformers build no mask and ask the cache for no length.
_NAME, _TRACED = "numba_kv", "numba_kv_traced"
#: Stands for an argument that a layer does not name.
_UNSAID = -1


def attend_pages(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    is_causal: bool | None = None,
    position_bias: Any = None,
    sliding_window: int | None = _UNSAID,
    **_: Any,
) -> tuple[Any, None]:
    """Return the attention of a layer over its pages, and no weights.

    Parameters
    ----------
    module : torch.nn.Module
        The layer's attention; not looked at.
    query : torch.Tensor [B, Hq, m, D]
        Of the last m tokens of the step.
    key, value : torch.Tensor
        What the cache returned; their content is read from the pages.
    attention_mask : None
        Nothing else is possible.
    dropout, scaling, softcap, s_aux, is_causal, position_bias
        As transformers names them.
    sliding_window : int, optional
        The layer's window, which the cache must know of.

    Returns
    -------
    torch.Tensor [B, m, Hq, D], None

    Raises
    ------
    StateError
        If K and V are not those that a cache with attention over pages returned just now.
    InputError
        If a mask, a bias, dropout or attention in both directions is wanted.
    UnsupportedModelError
        If the cache has another window than the layer.
    """
    stored = getattr(key, "numba_kv", None)
    is_of_key = getattr(value, "numba_kv", None) is stored
    if not isinstance(stored, StoredKV) or not is_of_key:
        raise StateError(
            "attention: K and V are not what a PagedCache with attention='paged' returned; such a model runs with that cache, "
            "through its own forward, one forward at a time"
        )
    _check_possible(attention_mask, dropout, is_causal, position_bias)
    if sliding_window != _UNSAID:
        stored.kv.check_window(stored.layer, sliding_window)
    return stored.kv.attend(stored, query, scaling, softcap, s_aux), None


def attend_traced(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    is_causal: bool | None = None,
    position_bias: Any = None,
    numba_kv_cache: int = 0,
    **_: Any,
) -> tuple[Any, None]:
    """Return the same by the operator of `transformers_op`, which stores K and V by the way: in forwards that are compiled.

    Parameters
    ----------
    module : torch.nn.Module
        The layer's attention; it knows the number of its layer.
    query, key, value : torch.Tensor [B, heads, 1, D]
        Of the step; K and V of the donor, if the layer borrows them.
    attention_mask, dropout, scaling, softcap, s_aux, is_causal, position_bias
        As in `attend_pages`.
    numba_kv_cache : int
        From `number_of`; an argument of the model's forward.

    Returns
    -------
    torch.Tensor [B, 1, Hq, D], None

    Raises
    ------
    InputError
        As `attend_pages`, while the forward is compiled.
    """
    _check_possible(attention_mask, dropout, is_causal, position_bias)
    found = torch.ops.numba_kv.attend(query, key, value, s_aux, numba_kv_cache, module.layer_idx, scaling, softcap)
    return found, None


def mask_of_pages(*_: Any, use_vmap: bool = False, allow_is_causal_skip: bool = True, **__: Any) -> None:
    """Return no mask: pages hold just what may be seen.

    Raises
    ------
    InputError
        If the model adds to a causal mask: tokens that see later ones, blocks, a mask of its own.
    """
    if use_vmap or not allow_is_causal_skip:
        raise InputError(
            "attention_mask: the model adds to a causal mask (images, blocks, both directions), which attention over pages "
            "cannot; use attention='gather'"
        )


class AttentionChoice:
    """Makes a decoder attend over pages, and puts back what it did before. Borrows its configurations.

    Parameters
    ----------
    decoder : torch.nn.Module
        The part of a model that holds its layers.

    Raises
    ------
    UnsupportedModelError
        If it does not choose its attention by name, or looks in both directions.
    """

    def __init__(self, decoder: Any) -> None:
        kind = type(decoder).__name__
        if not chooses_by_name(decoder):
            raise UnsupportedModelError(
                f"model: {kind} does not choose its attention by name; attention over pages is impossible, use "
                "attention='gather'"
            )
        if not getattr(decoder.config, "is_causal", True):
            raise UnsupportedModelError(
                f"model: tokens of {kind} see later ones, which attention over pages cannot; use attention='gather'"
            )
        AttentionInterface.register(_NAME, attend_pages)
        AttentionInterface.register(_TRACED, attend_traced)
        AttentionMaskInterface.register(_NAME, mask_of_pages)
        found: list[Any] = [getattr(module, "config", None) for module in decoder.modules()]
        self._configs = list({id(each): each for each in found if hasattr(each, "_attn_implementation")}.values())
        self._before: list[Any] | None = None

    def start(self, *, is_traced: bool = False) -> None:
        """Choose attention over pages; with `is_traced` as an operator, for torch.compile."""
        if self._before is None:
            self._before = [config._attn_implementation for config in self._configs]
        self._set([_TRACED if is_traced else _NAME] * len(self._configs))

    def stop(self) -> None:
        """Choose what was chosen before."""
        if self._before is not None:
            self._set(self._before)
            self._before = None

    def _set(self, names: list[Any]) -> None:
        for config, name in zip(self._configs, names, strict=True):
            config._attn_implementation = {"": name}  # of this configuration alone, not of those inside it


def chooses_by_name(decoder: Any) -> bool:
    """Return whether a decoder says that it chooses its attention by name, or its module at least knows how."""
    named = getattr(decoder, "_supports_attention_backend", False)
    return named or hasattr(sys.modules.get(type(decoder).__module__), "ALL_ATTENTION_FUNCTIONS")


def _check_possible(mask: Any, dropout: float, is_causal: bool | None, bias: Any) -> None:
    """Refuse what attention over pages cannot do."""
    for name, given in (("attention_mask", mask), ("position_bias", bias), ("dropout", dropout or None)):
        if given is not None:
            raise InputError(f"{name}: attention over pages knows none; use attention='gather' for this model")
    if is_causal is False:
        raise InputError("is_causal: False given; attention over pages sees no later tokens; use attention='gather'")
