"""``adapter_config.json``: what PEFT's layout says of an adapter beside its tensors.

Knows the keys that change what an adapter computes, and refuses those that a pair of matrices cannot express. Does not
know tensors.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numba_kv.config.read import show
from numba_kv.errors import LoRAError
from numba_kv.geometry import INT32_MAX
from numba_kv.weights.safetensors_file import read_whole

__all__ = ["CONFIG_NAME", "PeftConfig", "read_peft_config"]

#: Name of the file.
CONFIG_NAME = "adapter_config.json"
_MAX_NBYTES = 16 << 20
_MAX_PATTERN = 1000

#: Keys that have to be absent or empty, and what they would add.
_UNSUPPORTED = {
    "use_dora": "a magnitude vector",
    "use_qalora": "pooled inputs",
    "use_bdlora": "block-diagonal matrices",
    "lora_bias": "a bias",
    "layer_replication": "layers that the model does not have",
    "modules_to_save": "whole modules",
    "target_parameters": "adapters of parameters that are no linear layers",
    "trainable_token_indices": "rows of the embedding",
    "alora_invocation_tokens": "a place in the prompt from which the adapter acts",
    "arrow_config": "a router",
}
#: Initialisations that leave the base model's weights as they are.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """Ranks and scalings of an adapter.

    Attributes
    ----------
    path : str
        Of the file, for messages.
    rank, alpha : int, float
        Of every module that no pattern names.
    rank_pattern, alpha_pattern : mapping of str to number
        Pattern of module names -> rank or alpha; the first that matches counts.
    use_rslora : bool
        Whether the scaling is alpha / sqrt(rank) instead of alpha / rank.
    target_modules : tuple of str or None
        Last parts of the names of adapted modules; None: not listed.
    """

    path: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, float] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    target_modules: tuple[str, ...] | None = None

    def rank_of(self, module: str) -> int:
        """Return the rank that the file states for a module."""
        return int(_first_match(self.rank_pattern, module, self.rank))

    def scaling_of(self, module: str) -> float:
        """Return what B is multiplied by."""
        rank = self.rank_of(module)
        alpha = _first_match(self.alpha_pattern, module, self.alpha)
        return float(alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def covers(self, module: str) -> bool:
        """Return whether ``target_modules`` lists a module; without a list, every one."""
        if self.target_modules is None:
            return True
        return any(module == name or module.endswith(f".{name}") for name in self.target_modules)


def read_peft_config(path: str | os.PathLike[str]) -> PeftConfig:
    """Read and check an ``adapter_config.json``.

    Raises
    ------
    WeightError
        If it cannot be read.
    LoRAError
        If it is not JSON, a key is missing or wrong, or the adapter is more than pairs of matrices.
    """
    where = os.fspath(path)
    found = _load(read_whole(where, what=CONFIG_NAME, max_nbytes=_MAX_NBYTES), where)
    kind = found.get("peft_type", "LORA")
    if kind != "LORA":
        raise LoRAError(f"{where}: peft_type is {show(kind)}, only 'LORA' is supported")
    for key, what in _UNSUPPORTED.items():
        if found.get(key) not in (None, False, [], {}, ""):
            raise LoRAError(f"{where}: {key} is {show(found[key])}: {what}, which slots of A and B cannot hold")
    if found.get("bias", "none") != "none":
        raise LoRAError(f"{where}: bias is {show(found['bias'])}; only adapters without biases ('none') are supported")
    init = found.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise LoRAError(
            f"{where}: init_lora_weights is {show(init)}, which may have changed the base model's weights; "
            "save the adapter converted to a plain one"
        )
    rslora = found.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise LoRAError(f"{where}: use_rslora is {show(rslora)}, true or false is wanted")
    return PeftConfig(
        path=where,
        rank=_rank(found.get("r"), f"{where}: r"),
        alpha=_alpha(found.get("lora_alpha"), f"{where}: lora_alpha"),
        rank_pattern={p: _rank(v, f"{where}: rank_pattern {p!r}") for p, v in _pattern(found, "rank_pattern", where)},
        alpha_pattern={p: _alpha(v, f"{where}: alpha_pattern {p!r}") for p, v in _pattern(found, "alpha_pattern", where)},
        use_rslora=rslora,
        target_modules=_target_modules(found.get("target_modules"), where),
    )


def _load(text: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise LoRAError(f"{where}: one of {', '.join(sorted(found))[:200]} appears twice in an object")
        return found

    try:  # NaN and infinities come through: they are refused with the key's name
        found = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except LoRAError:
        raise
    except (ValueError, RecursionError) as error:
        raise LoRAError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise LoRAError(f"{where}: the JSON is {type(found).__name__}, an object is wanted")
    return found


def _rank(value: Any, what: str) -> int:
    if type(value) is not int or not 1 <= value <= INT32_MAX:
        raise LoRAError(f"{what} is {show(value)}, a rank from 1 on is wanted")
    return value


def _alpha(value: Any, what: str) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise LoRAError(f"{what} is {show(value)}, a finite number is wanted")
    return number


def _pattern(found: dict[str, Any], key: str, where: str) -> list[tuple[str, Any]]:
    value = found.get(key) or {}
    if not isinstance(value, dict):
        raise LoRAError(f"{where}: {key} is {show(value)}, an object of module names is wanted")
    for pattern in value:
        try:
            if len(pattern) > _MAX_PATTERN:
                raise re.error(f"longer than {_MAX_PATTERN} characters")
            re.compile(_anchored(pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise LoRAError(f"{where}: {key} has {show(pattern)}, which is no pattern of module names ({error})") from error
    return list(value.items())


def _target_modules(value: Any, where: str) -> tuple[str, ...] | None:
    if value is None or isinstance(value, str):  # "all-linear", or one pattern over whole names: nothing to compare with
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise LoRAError(f"{where}: target_modules is {show(value)}, a list of module names is wanted")
    return tuple(value)


def _first_match(patterns: Mapping[str, float], module: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(_anchored(pattern), module):
            return value
    return default


def _anchored(pattern: str) -> str:
    """Return a pattern that matches whole names, or their last parts."""
    return pattern if pattern.startswith("^") else rf"(.*\.)?({pattern})$"
