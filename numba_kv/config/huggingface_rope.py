"""Rotary parameters of a Hugging Face configuration, in both styles.

Knows the keys: one `rope_parameters` (flat, or one object per layer type) since version 5 of Transformers; before it
`rope_theta`, `rope_scaling`, `rope_local_base_freq` and `partial_rotary_factor` at the top level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from numba_kv.config.huggingface_families import PARTIAL_ROTARY_FACTORS, UNROTATED
from numba_kv.config.huggingface_layers import head_dims
from numba_kv.config.read import Reader
from numba_kv.config.rope import RopeConfig, partial_rotary_dim, read_rope_parameters

__all__ = ["read_ropes"]

_DEFAULT_THETA = 10_000.0
_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "mrope", "su")
#: Sliding layers first: the order of `LLMEngineConfig.ropes`.
_LAYER_TYPES = ("sliding_attention", "chunked_attention", "full_attention")
_OWN_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def read_ropes(reader: Reader, family: str, positions: int) -> tuple[RopeConfig, ...]:
    """Return the rotary parameters: one, or those of sliding and of full layers where they differ.

    Parameters
    ----------
    reader : Reader
        The text part of the configuration.
    family : str
        Its family.
    positions : int
        Positions the model was made for.
    """
    if (
        family in UNROTATED
        or reader.get("position_embedding_type") in ("alibi", "nope", "absolute")
        or reader.get("alibi") is True
        or (family == "granitemoehybrid" and reader.get("position_embedding_type") != "rope")
        or (family == "zamba2" and not reader.boolean("use_mem_rope", False))
        or (family == "olmo_hybrid" and _states_no_theta(reader))
    ):
        return ()
    sliding_dim, full_dim = head_dims(reader, family)
    if reader.has("rope_parameters"):
        parameters = reader.section("rope_parameters")
        per_type = [name for name in _LAYER_TYPES if parameters.has(name)]
        if not per_type:
            return (_read_one(parameters, reader, family, full_dim, positions, reader),)
        found = [
            _read_one(
                parameters.section(name), reader, family, full_dim if name == "full_attention" else sliding_dim, positions, None
            )
            for name in per_type
        ]
        return _distinct(found)
    scaling = reader.section("rope_scaling") if reader.has("rope_scaling") else reader.with_values({})
    full = _read_one(scaling, reader, family, full_dim, positions, reader)
    if not reader.has("rope_local_base_freq"):
        return (full,)
    # The older style states the sliding layers' base alone: they are never scaled.
    local = RopeConfig(
        rope_type="default",
        theta=reader.number("rope_local_base_freq"),
        rotary_dim=_rotary_dim("default", reader, reader, family, sliding_dim),
        max_position_embeddings=positions,
    )
    return _distinct([local, full])


def _states_no_theta(reader: Reader) -> bool:
    """Return whether rotation is switched off by a base that is stated to be null."""
    if not reader.has("rope_parameters"):
        return False
    values = reader.section("rope_parameters").values
    return "rope_theta" in values and values["rope_theta"] is None


def _distinct(ropes: list[RopeConfig]) -> tuple[RopeConfig, ...]:
    return tuple(rope for index, rope in enumerate(ropes) if rope not in ropes[:index])


def _read_one(
    scaling: Reader, reader: Reader, family: str, head_dim: int, positions: int, theta_source: Reader | None
) -> RopeConfig:
    key = "rope_type" if scaling.has("rope_type") else "type"
    rope_type = scaling.choice(key, _TYPES, "default")
    rope_type = "longrope" if rope_type == "su" else rope_type
    if rope_type == "default" and scaling.has("mrope_section"):
        rope_type = "mrope"
    if scaling.has("rope_theta"):
        theta = scaling.number("rope_theta")
    else:
        theta_key = "rotary_emb_base" if family == "gpt_neox" else "rope_theta"
        theta = theta_source.number(theta_key, _DEFAULT_THETA) if theta_source is not None else _DEFAULT_THETA
    rotary_dim = _rotary_dim(rope_type, scaling, reader, family, head_dim)
    parameters = {
        name: _frozen(value) for name, value in scaling.values.items() if isinstance(name, str) and name not in _OWN_KEYS
    }
    # Only this type has no meaning without the context length that it was trained with.
    original = None if rope_type == "llama3" else positions
    parameters.update(read_rope_parameters(rope_type, scaling, reader, rotary_dim, original))
    if rope_type == "yarn" and not scaling.has("attention_factor") and scaling.has("mscale") and scaling.has("mscale_all_dim"):
        parameters["attention_factor"] = _magnitude(scaling, "mscale") / _magnitude(scaling, "mscale_all_dim")
    if rope_type == "proportional":
        parameters["partial_rotary_factor"] = scaling.number("partial_rotary_factor", 1.0, up_to=1.0)
    return RopeConfig(
        rope_type=rope_type, theta=theta, rotary_dim=rotary_dim, max_position_embeddings=positions, parameters=parameters
    )


def _magnitude(scaling: Reader, key: str) -> float:
    factor = scaling.number("factor")
    return 0.1 * scaling.number(key) * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _rotary_dim(rope_type: str, scaling: Reader, reader: Reader, family: str, head_dim: int) -> int:
    if rope_type == "proportional":
        return head_dim
    if family in ("gptj", "codegen"):
        return reader.integer("rotary_dim", 1, head_dim, head_dim)
    key = "rotary_pct" if family == "gpt_neox" and not scaling.has("partial_rotary_factor") else "partial_rotary_factor"
    source = scaling if scaling.has(key) else reader
    factor = source.number(key, PARTIAL_ROTARY_FACTORS.get(family, 1.0), up_to=1.0)
    rotary_dim = partial_rotary_dim(head_dim, factor)
    if rotary_dim < 1:
        raise source.wrong(key, factor, f"large enough to rotate one of {head_dim} channels")
    return rotary_dim


def _frozen(value: object) -> object:
    """Return `value` with lists as tuples, so that a configuration stays what it was."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    return dict(value) if isinstance(value, Mapping) else value
