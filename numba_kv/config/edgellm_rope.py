"""Rotary parameters of an Edge-LLM configuration.

Knows the reference's keys, defaults and precedence. The reference takes the default rotation for a type it does not know; this
reader refuses, because tables of the wrong kind would give wrong tokens without a sign.
"""

from __future__ import annotations

from numba_kv.config.read import Reader
from numba_kv.config.rope import RopeConfig, partial_rotary_dim, read_rope_parameters

__all__ = ["read_rope", "read_ropes"]

_DEFAULT_THETA = 100_000.0
_DEFAULT_POSITIONS = 32_768
_TYPES = ("default", "llama3", "proportional", "dynamic", "longrope", "yarn", "nope", "mrope")


def read_ropes(reader: Reader, head_dim: int, full_head_dim: int) -> tuple[RopeConfig, ...]:
    """Return one record, or that of the sliding and that of the full layers where the file has a block for each.

    A block inherits ``max_position_embeddings`` from the top level and nothing else.
    """
    blocks = ("sliding_rope_config", "full_rope_config")
    present = [key for key in blocks if reader.get(key) is not None]
    if not present:
        return (read_rope(reader, head_dim, reader),)
    found = []
    for key, dim_key, dim in zip(blocks, ("sliding_rotary_dim", "full_rotary_dim"), (head_dim, full_head_dim), strict=True):
        block = reader.section(key)  # a block without the other is refused here: it would have no effect
        if "max_position_embeddings" not in block.values and "max_position_embeddings" in reader.values:
            block = block.with_values({**block.values, "max_position_embeddings": reader.values["max_position_embeddings"]})
        rotary_dim = reader.integer_or_none(dim_key, 1, dim)
        rope = read_rope(block, dim, reader, rotary_dim)
        if rope.rope_type == "mrope":
            raise reader.error(key, "mrope is not one of the types that a layer kind can have for itself")
        found.append(rope)
    return tuple(found)


def read_rope(reader: Reader, head_dim: int, model: Reader, rotary_dim: int | None = None) -> RopeConfig:
    """Return the record that `reader` holds.

    Parameters
    ----------
    reader : Reader
        The object with ``rope_scaling``, ``rope_theta`` and ``max_position_embeddings``.
    head_dim : int
        Channels of a head.
    model : Reader
        The top level, for the head size that the dynamic type scales with.
    rotary_dim : int or None
        Rotated channels, if stated.
    """
    positions = reader.integer("max_position_embeddings", 1, default=_DEFAULT_POSITIONS)
    has_scaling = reader.get("rope_scaling") is not None
    scaling = reader.section("rope_scaling") if has_scaling else reader.with_values({})
    # `type` wins where both are there.
    rope_type = scaling.choice("type" if scaling.has("type") else "rope_type", _TYPES, "default")
    if rope_type == "default" and scaling.has("mrope_section"):
        rope_type = "mrope"
    if not reader.boolean("use_rope", True):
        rope_type = "nope"
    theta = _DEFAULT_THETA if rope_type == "nope" else reader.number("rope_theta", _DEFAULT_THETA)
    if rotary_dim is None:
        rotary_dim = _rotary_dim(reader, rope_type, head_dim)
    parameters = read_rope_parameters(rope_type, scaling, reader, rotary_dim, None)
    if rope_type == "proportional":
        source = scaling if scaling.has("partial_rotary_factor") else reader
        parameters["partial_rotary_factor"] = source.number("partial_rotary_factor", 1.0, up_to=1.0)
        parameters["factor"] = scaling.number("factor", 1.0)
    if rope_type == "dynamic" and scaling.has("alpha"):
        theta = _scaled_theta(scaling, model, theta)
    return RopeConfig(
        rope_type=rope_type, theta=theta, rotary_dim=rotary_dim, max_position_embeddings=positions, parameters=parameters
    )


def _rotary_dim(reader: Reader, rope_type: str, head_dim: int) -> int:
    if rope_type == "proportional":
        return head_dim
    factor = reader.number("partial_rotary_factor", 1.0, up_to=1.0)
    rotary_dim = partial_rotary_dim(head_dim, factor)
    if rotary_dim < 1:
        raise reader.wrong("partial_rotary_factor", factor, f"large enough to rotate one of {head_dim} channels")
    return rotary_dim


def _scaled_theta(scaling: Reader, model: Reader, theta: float) -> float:
    """Return the base that `alpha` stretches: theta x alpha ** (d / (d - 2))."""
    alpha = scaling.number("alpha")
    if model.has("head_dim"):
        dim = model.integer("head_dim", 1)
    else:
        dim = model.integer("hidden_size", 1) // model.integer("num_attention_heads", 1)
    if dim <= 2:
        raise scaling.error("alpha", f"{alpha:g} needs heads of more than 2 channels, not {dim}")
    try:
        scaled: float = theta * alpha ** (dim / (dim - 2))
    except OverflowError:
        scaled = float("inf")
    if not 0.0 < scaled < float("inf"):
        raise scaling.wrong("alpha", alpha, f"a number that keeps the base {theta:g} finite")
    return scaled
