"""Hooks that tell a paged cache where the forwards of its model begin and end."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

__all__ = ["decoder_of", "hook_forwards"]


class _Cache(Protocol):
    """What is told about forwards."""

    _is_traced: bool

    def _forward_begins(self, mask: Any, shape: tuple[int, int] | None) -> None: ...

    def _forward_ends(self, has_failed: bool) -> None: ...


def decoder_of(model: Any) -> Any:
    """Return the part of a model that holds its layers. Some call the head that decodes hidden states their decoder."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else model
    has_layers = any(isinstance(each, torch.nn.ModuleList) for each in found.modules())
    return found if has_layers else getattr(model, "base_model", model)


def _shape(args: Any, kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of what a decoder is given, ids or their embeddings; None if it is called in another way."""
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
    shape = next((each.shape for each in given if getattr(each, "ndim", 0) >= 2), None)
    return None if shape is None else (int(shape[0]), int(shape[1]))


def hook_forwards(model: Any, cache: _Cache) -> weakref.finalize[..., Any]:
    """Make the model's decoder tell `cache` where its forwards begin and end; calling the result ends that.

    The hooks know the cache weakly, so that it can go while the model stays, and take no notice of forwards with another cache.
    """
    decoder = decoder_of(model)
    module, told = weakref.ref(decoder), weakref.ref(cache)

    def of(owner: Any, kwargs: dict[str, Any]) -> _Cache | None:
        given = kwargs.get("cache", kwargs.get("past_key_values"))
        found = told()
        if found is None or found._is_traced:
            return None
        return found if given is found and owner is module() else None

    def before(owner: Any, args: Any, kwargs: dict[str, Any]) -> None:
        found = of(owner, kwargs)
        if found is not None:
            found._forward_begins(kwargs.get("attention_mask"), _shape(args, kwargs))

    def behind(owner: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        found = of(owner, kwargs)
        if found is not None:
            found._forward_ends(has_failed=result is None)

    handles = [
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(behind, with_kwargs=True, always_call=True),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return weakref.finalize(cache, remove)
