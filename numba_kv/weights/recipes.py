"""Recipes: how a declared weight is assembled from the tensors of a checkpoint.

Knows shapes, element types and order. Does not know devices: a recipe ends in a `Fill`, which writes any range of the
result, so that no result ever exists as a whole on the host.

Recipes that repack into a layout of the reference's own plugins (GPTQ, AWQ, NVFP4 and INT4 weights) are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from numba_kv.errors import UnsupportedModelError, WeightError
from numba_kv.weights.assembly import Assembly, FileRange
from numba_kv.weights.binding import WeightBinding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.weights.checkpoint import Checkpoint
    from numba_kv.weights.safetensors_header import TensorEntry
    from numba_kv.weights.windows import Fill

__all__ = ["RECIPES", "UNSUPPORTED_RECIPES", "assemble"]

_FLOATS = ("float32", "float16", "bfloat16")
_MAX_EXPERTS = 512

#: In the reference, but ending in bytes whose order only its plugins know.
UNSUPPORTED_RECIPES = frozenset(
    {
        "gptq_ffn_qweight",
        "gptq_qkv_qweight",
        "awq_ffn_qweight",
        "modelopt_awq_ffn_qweight",
        "nvfp4_gated_fc1_qweight",
        "nvfp4_gated_fc1_scale",
        "nvfp4_gated_fc2_qweight",
        "nvfp4_gated_fc2_scale",
        "nvfp4_expert_qweight",
        "nvfp4_expert_scale",
        "int4_moe_gate_up",
        "int4_moe_gate_up_scales",
        "int4_moe_down",
        "int4_moe_down_scales",
    }
)


def assemble(binding: WeightBinding, checkpoint: Checkpoint) -> Fill:
    """Return what writes the weight of `binding`. Everything that can be wrong without reading the bytes is checked now.

    Raises
    ------
    WeightError
        If a source is missing, or its shape or element type is not what the recipe takes.
    UnsupportedModelError
        If the recipe is one that only the reference's plugins can read.
    """
    recipe = RECIPES.get(binding.recipe)
    if recipe is None:
        if binding.recipe in UNSUPPORTED_RECIPES:
            raise UnsupportedModelError(
                f"weight {binding.name!r}: recipe {binding.recipe!r} repacks for a plugin of TensorRT Edge-LLM; "
                "it is not supported"
            )
        raise WeightError(f"weight {binding.name!r}: recipe {binding.recipe!r} is unknown; known are {', '.join(RECIPES)}")
    return recipe(binding, checkpoint)


def _identity(binding: WeightBinding, checkpoint: Checkpoint) -> Fill:
    """First key that exists; same type, or float32 and bfloat16 to float16; as it is, transposed, or one shard of it."""
    entry = checkpoint.tensors[_first_key(binding, checkpoint)]
    out = binding.dtype
    narrows = out.name == "float16" and entry.dtype.name in _FLOATS
    if entry.dtype is not out and not narrows:
        also = ", float32 or bfloat16" if out.name == "float16" else "; cast_to_fp32 makes float32 of other floats"
        raise _mismatch(binding, entry, f"identity takes {out}{also}")
    if binding.embedding_scale != 1.0 and out.name != "float16":
        raise WeightError(f"weight {binding.name!r}: embedding_scale is for float16 weights, this one is {out}")
    if binding.shard is not None:
        if binding.rank0_only:
            return _rank0(binding, entry, checkpoint)
        return _shard(binding, entry, checkpoint)
    if entry.shape == binding.shape:
        return _scaled(binding, entry, checkpoint, (slice(None),))
    if len(entry.shape) == 2 and entry.shape[::-1] == binding.shape and out.name == "float16":
        return _converted(binding, [checkpoint.array(entry.name).T])
    raise _mismatch(binding, entry, f"shape {list(binding.shape)} is wanted, or a matrix's transpose of float16 weights")


def _rank0(binding: WeightBinding, entry: TensorEntry, checkpoint: Checkpoint) -> Fill:
    if entry.shape != binding.shape:
        raise _mismatch(binding, entry, f"shape {list(binding.shape)} is wanted")
    if binding.shard is not None and binding.shard.rank:
        return Assembly.constant(binding.dtype, 0.0)
    return _scaled(binding, entry, checkpoint, (slice(None),))


def _shard(binding: WeightBinding, entry: TensorEntry, checkpoint: Checkpoint) -> Fill:
    shard = binding.shard
    if shard is None or shard.axis >= len(entry.shape) or (shard.axis == 1 and len(entry.shape) != 2):
        raise _mismatch(binding, entry, "a shard is cut along axis 0, or along axis 1 of a matrix")
    extent = entry.shape[shard.axis]
    part = extent // shard.size
    wanted = (*entry.shape[: shard.axis], part, *entry.shape[shard.axis + 1 :])
    if extent % shard.size or wanted != binding.shape:
        raise _mismatch(binding, entry, f"1 of {shard.size} shards along axis {shard.axis} has to be {list(binding.shape)}")
    cut = slice(shard.rank * part, (shard.rank + 1) * part)
    return _scaled(binding, entry, checkpoint, (cut,) if shard.axis == 0 else (slice(None), cut))


def _scaled(binding: WeightBinding, entry: TensorEntry, checkpoint: Checkpoint, cut: tuple[slice, ...]) -> Fill:
    """Return the bytes of the file themselves where nothing has to be changed, else a conversion."""
    if entry.dtype is binding.dtype and binding.embedding_scale == 1.0 and len(cut) == 1:
        rows = entry.shape[0] if entry.shape else 1
        skipped = (cut[0].start or 0) * (entry.nbytes // rows if rows else 0)
        return FileRange(checkpoint.file_of(entry.name), entry.offset + skipped)
    source = checkpoint.array(entry.name)
    return _converted(binding, [source[cut] if source.ndim else source], binding.embedding_scale)


def _cast_to_fp32(binding: WeightBinding, checkpoint: Checkpoint) -> Fill:
    """One key of the same shape, any of the three float types, to float32."""
    entry = _one_key(binding, checkpoint)
    _want_output(binding, "float32")
    if entry.dtype.name not in _FLOATS or entry.shape != binding.shape:
        raise _mismatch(binding, entry, f"{', '.join(_FLOATS)} of shape {list(binding.shape)} is wanted")
    return _converted(binding, [checkpoint.array(entry.name)])


def _fill(binding: WeightBinding, checkpoint: Checkpoint) -> Fill:
    """No key; every element is `fill_value`."""
    _want_output(binding, "float32")
    return Assembly.constant(binding.dtype, binding.fill_value)


def _activation_permutation(binding: WeightBinding, checkpoint: Checkpoint) -> Fill:
    """One int32 g_idx [K]; the rows of group 0 in their order, then those of group 1, and so on."""
    import numpy as np

    entry = _one_key(binding, checkpoint)
    _want_output(binding, "int32")
    if entry.dtype.name != "int32" or len(entry.shape) != 1 or entry.shape != binding.shape:
        raise _mismatch(binding, entry, f"int32 of shape {list(binding.shape)} is wanted")
    size, count = binding.group_size, entry.shape[0]
    if size < 1 or count % size:
        raise WeightError(f"weight {binding.name!r}: group_size {size} does not divide the {count} rows of {entry.name!r}")
    groups: NDArray[Any] = checkpoint.array(entry.name)
    known = bool(np.all((groups >= 0) & (groups < count // size)))
    if not known or np.any(np.bincount(groups, minlength=count // size) != size):
        raise WeightError(
            f"weight {binding.name!r}: {entry.name!r} does not put {size} rows into each of {count // size} groups"
        )
    return _converted(binding, [np.argsort(groups, kind="stable").astype(np.int32)])


def _qkv_scales(binding: WeightBinding, checkpoint: Checkpoint) -> Fill:
    """Three float16 [groups, width]: joined along the width, in the order of the keys."""
    entries = _all_keys(binding, checkpoint)
    _want_output(binding, "float16")
    groups = entries[0].shape[0] if entries[0].shape else 0
    if len(entries) != 3:
        raise WeightError(f"weight {binding.name!r}: {len(entries)} keys given, those of q, k and v are wanted")
    for entry in entries:
        if entry.dtype.name != "float16" or len(entry.shape) != 2 or entry.shape[0] != groups:
            raise _mismatch(binding, entry, f"float16 [{groups}, width] is wanted")
    _want_shape(binding, (groups, sum(entry.shape[1] for entry in entries)))
    sources = [checkpoint.array(entry.name) for entry in entries]
    return _converted(binding, [source[group] for group in range(groups) for source in sources])


def _expert_maxima(binding: WeightBinding, checkpoint: Checkpoint) -> Fill:
    """Per expert the largest of its `keys_per_expert` float32 scalars, or the reciprocal of it."""
    import numpy as np

    entries = _all_keys(binding, checkpoint)
    _want_output(binding, "float32")
    each = binding.keys_per_expert
    if each < 1 or len(entries) % each or len(entries) // each > _MAX_EXPERTS:
        raise WeightError(
            f"weight {binding.name!r}: {len(entries)} keys of {each} an expert; "
            f"whole experts, at most {_MAX_EXPERTS}, are wanted"
        )
    _want_shape(binding, (len(entries) // each,))
    for entry in entries:
        if entry.dtype.name != "float32" or entry.nbytes != 4:
            raise _mismatch(binding, entry, "one float32 is wanted")
        value = float(checkpoint.array(entry.name).reshape(()))
        if not 0.0 < value < float("inf"):
            raise WeightError(f"weight {binding.name!r}: {entry.name!r} is {value}, a finite number above 0 is wanted")
    values = np.array([float(checkpoint.array(entry.name).reshape(())) for entry in entries], np.float32)
    largest = values.reshape(-1, each).max(axis=1)
    return _converted(binding, [(np.float32(1) / largest if binding.reciprocal else largest).astype(np.float32)])


def _stacked(keys_per_expert: int) -> Callable[[WeightBinding, Checkpoint], Fill]:
    def recipe(binding: WeightBinding, checkpoint: Checkpoint) -> Fill:
        entries = _all_keys(binding, checkpoint)
        _want_output(binding, "float16")
        if len(entries) % keys_per_expert:
            raise WeightError(f"weight {binding.name!r}: {len(entries)} keys given, {keys_per_expert} an expert are wanted")
        first = entries[0].shape
        for entry in entries:
            if entry.dtype.name not in _FLOATS or len(entry.shape) != 2 or entry.shape != first:
                raise _mismatch(binding, entry, f"{', '.join(_FLOATS)} matrices of one shape, as {list(first)}, are wanted")
        _want_shape(binding, (len(entries) // keys_per_expert, first[0] * keys_per_expert, first[1]))
        return _converted(binding, [checkpoint.array(entry.name) for entry in entries])

    return recipe


#: Name of a recipe -> what checks its sources and returns what writes the weight.
RECIPES: dict[str, Callable[[WeightBinding, Checkpoint], Fill]] = {
    "identity": _identity,
    "cast_to_fp32": _cast_to_fp32,
    "fill": _fill,
    "gptq_activation_permutation": _activation_permutation,
    "gptq_qkv_scales": _qkv_scales,
    "nvfp4_fc1_alpha": _expert_maxima,
    "nvfp4_fc2_alpha": _expert_maxima,
    "fp16_moe_fc1": _stacked(2),
    "fp16_moe_fc1_relu2": _stacked(1),
    "fp16_moe_fc2": _stacked(1),
}


def _converted(binding: WeightBinding, parts: Sequence[NDArray[Any]], scale: float = 1.0) -> Fill:
    return Assembly(f"weight {binding.name!r}", binding.dtype, parts, scale)


def _first_key(binding: WeightBinding, checkpoint: Checkpoint) -> str:
    for key in binding.keys:
        if key in checkpoint:
            return key
    raise WeightError(f"weight {binding.name!r}: none of {', '.join(map(repr, binding.keys))} is in the checkpoint")


def _one_key(binding: WeightBinding, checkpoint: Checkpoint) -> TensorEntry:
    entries = _all_keys(binding, checkpoint)
    if len(entries) != 1:
        raise WeightError(f"weight {binding.name!r}: {len(entries)} keys given, {binding.recipe} takes 1")
    return entries[0]


def _all_keys(binding: WeightBinding, checkpoint: Checkpoint) -> list[TensorEntry]:
    for key in binding.keys:
        if key not in checkpoint:
            raise WeightError(f"weight {binding.name!r}: {key!r} is not in the checkpoint")
    if not binding.keys:
        raise WeightError(f"weight {binding.name!r}: {binding.recipe} needs keys")
    return [checkpoint.tensors[key] for key in binding.keys]


def _want_output(binding: WeightBinding, name: str) -> None:
    if binding.dtype.name != name:
        raise WeightError(f"weight {binding.name!r}: {binding.recipe} makes {name}, {binding.dtype} is declared")


def _want_shape(binding: WeightBinding, shape: tuple[int, ...]) -> None:
    if binding.shape != shape:
        raise WeightError(f"weight {binding.name!r}: {binding.recipe} makes {list(shape)}, {list(binding.shape)} is declared")


def _mismatch(binding: WeightBinding, entry: TensorEntry, wanted: str) -> WeightError:
    return WeightError(f"weight {binding.name!r}: {entry.name!r} is {entry.dtype} {list(entry.shape)}; {wanted}")
