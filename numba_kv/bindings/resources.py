"""bind: everything that an engine reads of SharedResources in one step, by name."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index as as_integer

from numba_kv.batch import StepView
from numba_kv.bindings.names import DEEPSTACK_EMBEDS, KV_SLOT_MAPPING
from numba_kv.bindings.sources import bind_deepstack, bind_kv, bind_lora, bind_scratch, bind_states, bind_step, bind_tables
from numba_kv.bindings.tensor_map import TensorMap
from numba_kv.cache import HybridCacheManager
from numba_kv.device import Tensor
from numba_kv.errors import InputError, StateError
from numba_kv.shared_resources import SharedResources

__all__ = ["bind"]


def bind(
    resources: SharedResources,
    view: StepView,
    *,
    index: int = 0,
    into: TensorMap | None = None,
    extra: Mapping[str, Tensor] | None = None,
) -> TensorMap:
    """Bind the caches, tables and step data of a model.

    Parameters
    ----------
    resources : SharedResources
        Where the tensors are; borrowed.
    view : StepView
        The step: how many rows and tokens the inputs have.
    index : int
        Model; 0 is the base, 1 the draft. A draft that reads the base's KV is bound to the base's pools and tables, as a step
        of the base left them; its tokens are the caller's to bind.
    into : TensorMap, optional
        A map of an earlier step of the same batch, to be brought up to date. None: a new one.
    extra : mapping of str to Tensor, optional
        What else is to be bound: `bind_rope`, `bind_lora`, the runner's inputs and outputs, deep-stack features of a step with
        images, which take the place of zeros. What an earlier call bound and this one does not name stays as it is.

    Returns
    -------
    TensorMap
        `into`, or the new one. `binding_names` lists what an engine declares; `TensorMap.missing` what is left to the caller.

    Raises
    ------
    InputError
        If `index` is out of range, `view` is of other resources, or `extra` names what the resources bind.
    CapacityError
        If the zero buffer is too small for the deep-stack inputs; see `bind_deepstack`.
    StateError
        If `resources` or `into` is closed.

    Notes
    -----
    Addresses never change. A step of as many rows and tokens needs no new map, and a captured step none at all.

    Stream: host only. Cost: no allocation on the device, no copy.
    """
    manager = _manager(resources, view, index)
    given = dict(extra or {})
    if manager is resources.cache_managers[0] and index:
        found = _shared(resources, manager, view)
    else:
        found = {**bind_step(manager, view), **bind_tables(manager, view), **bind_scratch(resources, index), **bind_kv(manager)}
        found.update(bind_states(manager))
    is_base = not index  # whose the adapters and features are
    if is_base and resources.lora_manager is not None:
        found.update(bind_lora(resources.lora_manager.bindings))
    features = resources.config.num_deepstack_features if is_base else 0
    if any(f"{DEEPSTACK_EMBEDS}_{feature}" not in given for feature in range(features)):
        found.update((name, zeros) for name, zeros in bind_deepstack(resources, view).items() if name not in given)
    twice = next((name for name in given if name in found), None)
    if twice is not None:
        raise InputError(f"extra: {twice!r} is bound to the resources' own tensor; leave it out")
    tensors = TensorMap() if into is None else into
    tensors.update({**found, **given})
    return tensors


def _manager(resources: SharedResources, view: StepView, index: int) -> HybridCacheManager:
    if not isinstance(resources, SharedResources):
        raise InputError(f"resources: {type(resources).__name__} is not a SharedResources")
    if resources.is_closed:
        raise StateError("SharedResources is closed")
    if not isinstance(view, StepView):
        raise InputError(f"view: {type(view).__name__} is not a StepView; Batch.step returns one")
    try:
        number = -1 if isinstance(index, bool) else as_integer(index)
    except TypeError:
        number = -1
    models = 1 if resources.deployment.draft is None else 2
    if not 0 <= number < models:
        raise InputError(f"index: {index!r} is not one of the {models} models")
    manager = resources.get_caches(number)
    if view.positions is not manager.step_buffers.positions:
        raise InputError(f"view: {view!r} is of another batch, not of model {number} of these resources")
    return manager


def _shared(resources: SharedResources, manager: HybridCacheManager, view: StepView) -> dict[str, Tensor]:
    """Return what a draft reads that has no KV of its own: the base's, as far as the base's last step went."""
    deployment = resources.deployment
    layers = () if deployment.spec is None else deployment.spec.target_kv_layers
    tables = bind_tables(manager, view, deployment.draft)
    return {
        "attention_sequence_lengths": view.seq_lens[: view.num_rows],
        **{name: table for name, table in tables.items() if KV_SLOT_MAPPING not in name},
        **bind_scratch(resources),
        **bind_kv(manager, layers),
    }
