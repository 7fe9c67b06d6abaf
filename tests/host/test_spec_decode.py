"""SpecDecodeConfig: what follows from the numbers of a round, and which numbers are refused."""

from __future__ import annotations

from typing import Any

import pytest

from numba_kv.config import SpecDecodeConfig
from numba_kv.config.spec_decode import SPEC_MODES
from numba_kv.errors import ConfigError
from tests.helpers.deployments import SPECS, spec

# mode, numbers; tokens verified, tokens drafted, kept, width of verification and draft, tokens that states are kept for
ROUNDS = [
    ("mtp", {"steps": 3}, 4, 3, 4, (4, 3), 4),
    ("mtp", {"steps": 3, "max_verify_tokens": 9, "max_draft_tokens": 12}, 4, 3, 4, (9, 12), 9),
    ("mtp", {"steps": 3, "top_k": 4, "verify_tokens": 20}, 20, 12, 4, (20, 12), 20),
    ("mtp", {"steps": 3, "top_k": 4, "verify_tokens": 20, "drafts_fan_out": True}, 20, 3, 4, (20, 3), 20),
    ("eagle3", {"steps": 6, "top_k": 10, "verify_tokens": 60}, 60, 60, 7, (60, 60), 60),
    ("eagle3", {"steps": 2, "top_k": 10, "verify_tokens": 8}, 8, 20, 3, (8, 20), 8),
    ("dflash", {"block_size": 16}, 16, 16, 16, (16, 16), 16),
    ("dflash", {"block_size": 16, "top_k": 2, "verify_tokens": 12}, 12, 16, 12, (12, 16), 12),
    ("jetspec", {"block_size": 2}, 2, 2, 2, (2, 2), 2),
    ("dspark", {"block_size": 7}, 8, 7, 8, (8, 7), 8),
    ("dspark", {"block_size": 7, "samples_from_anchor": False}, 8, 8, 8, (8, 7), 8),
    ("dspark", {"block_size": 7, "top_k": 4, "verify_tokens": 60}, 60, 7, 60, (60, 7), 60),
    ("gemma4_mtp", {"steps": 20}, 21, 20, 21, (21, 20), 21),
]


@pytest.mark.parametrize(("mode", "numbers", "verify", "drafted", "kept", "widths", "states"), ROUNDS)
def test_what_a_round_takes(
    mode: str, numbers: dict[str, Any], verify: int, drafted: int, kept: int, widths: tuple[int, int], states: int
) -> None:
    found = spec(mode, **numbers)
    assert (found.verify_tokens, found.draft_tokens, found.max_accepted_tokens) == (verify, drafted, kept)
    assert (found.max_verify_tokens, found.max_draft_tokens) == widths
    assert found.verify_state_tokens == states
    assert found.max_proposal_tokens == max(verify, widths[1])
    assert SpecDecodeConfig(**vars(found)) == found  # what was filled in is what may be stated


@pytest.mark.parametrize("mode", SPEC_MODES)
def test_modes(mode: str) -> None:
    found = spec(mode)
    assert found.proposes_blocks == (mode in ("dflash", "jetspec", "dspark"))
    assert found.shares_target_kv == (mode == "gemma4_mtp")
    assert not found.is_tree
    assert spec(mode, top_k=2, verify_tokens=8, max_draft_tokens=8).is_tree


# mode, changed numbers, what the message has to say
BAD: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("mtp", {"mode": "medusa"}, ("mode", "'medusa'", "eagle3")),
    ("mtp", {"mode": None}, ("mode", "null")),
    ("mtp", {"top_k": 0}, ("top_k", "0 is not in 1..")),
    ("mtp", {"top_k": True}, ("top_k", "true is not an integer")),
    ("mtp", {"steps": 0}, ("steps", "0 is not in 1..")),
    ("mtp", {"steps": 2.0}, ("steps", "2.0 is not an integer")),
    ("mtp", {"verify_tokens": -1}, ("verify_tokens", "-1")),
    ("mtp", {"verify_tokens": 3}, ("verify_tokens", "3 is not steps + 1, which is 4")),
    ("mtp", {"verify_tokens": 2**31}, ("verify_tokens", "2147483648")),
    ("mtp", {"max_verify_tokens": 3}, ("verify_tokens: 4", "max_verify_tokens 3")),
    ("mtp", {"max_draft_tokens": 2}, ("steps: 3", "max_draft_tokens 2")),
    ("mtp", {"top_k": 2, "verify_tokens": 8, "max_draft_tokens": 5}, ("steps: 3 x top_k 2", "max_draft_tokens 5")),
    ("mtp", {"top_k": 2}, ("verify_tokens", "a tree")),
    ("mtp", {"top_k": 4, "verify_tokens": 4}, ("top_k: 4 is not below verify_tokens 4",)),
    ("mtp", {"drafts_fan_out": 1}, ("drafts_fan_out", "1 is not True or False")),
    ("mtp", {"block_size": 4}, ("block_size: 4", "step by step")),
    ("mtp", {"has_sps_scheduler": True}, ("has_sps_scheduler", "only 'dspark'")),
    ("mtp", {"confidence_threshold": 0.5}, ("confidence_threshold: 0.5", "only 'dspark'")),
    ("mtp", {"target_layers": [1]}, ("target_layers", "[1]", "not a tuple")),
    ("mtp", {"target_layers": (0, -1)}, ("target_layers[1]", "-1")),
    ("mtp", {"target_layers": (2, 2)}, ("target_layers", "twice")),
    ("mtp", {"target_kv_layers": (0,)}, ("target_kv_layers", "'mtp'", "of its own")),
    ("eagle3", {"target_layers": ()}, ("target_layers", "empty", "'eagle3'")),
    ("dflash", {"target_layers": ()}, ("target_layers", "empty", "'dflash'")),
    ("dflash", {"block_size": 1}, ("block_size: 1 is not 2 or more",)),
    ("dflash", {"block_size": 0}, ("block_size: 0 is not 2 or more",)),
    ("dflash", {"steps": 2}, ("steps: 2 is not 1",)),
    ("dflash", {"verify_tokens": 3}, ("verify_tokens: 3 is not block_size 4",)),
    ("dflash", {"max_draft_tokens": 3}, ("block_size: 4", "max_draft_tokens 3")),
    ("jetspec", {"top_k": 4, "verify_tokens": 4}, ("top_k: 4 is not below verify_tokens 4",)),
    ("dspark", {"block_size": 0}, ("block_size: 0 is not 1 or more",)),
    ("dspark", {"verify_tokens": 1}, ("verify_tokens: 1 is not in 2..4",)),
    ("dspark", {"verify_tokens": 5}, ("verify_tokens: 5 is not in 2..4",)),
    ("dspark", {"confidence_threshold": "0.5"}, ("confidence_threshold", "'0.5' is not a number")),
    ("dspark", {"confidence_threshold": float("nan")}, ("confidence_threshold", "nan is not a number")),
    ("dspark", {"confidence_threshold": 1.5}, ("confidence_threshold", "1.5 is not in 0..1")),
    ("dspark", {"top_k": 2, "verify_tokens": 8, "has_sps_scheduler": True}, ("has_sps_scheduler", "tree")),
    ("dspark", {"top_k": 2, "verify_tokens": 8, "confidence_threshold": 1.0}, ("confidence_threshold", "tree")),
]


@pytest.mark.parametrize(("mode", "changes", "words"), BAD)
def test_bad_numbers(mode: str, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        SpecDecodeConfig(**{"mode": mode, **SPECS[mode], **changes})
    for word in words:
        assert word in str(caught.value)


# mode, the largest round that the reference can do, what is one too many
LIMITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("mtp", {"steps": 15}, {"steps": 16}),
    ("mtp", {"steps": 1, "top_k": 8, "verify_tokens": 128}, {"top_k": 9}),
    ("mtp", {"steps": 1, "top_k": 8, "verify_tokens": 128}, {"verify_tokens": 129}),
    ("gemma4_mtp", {"steps": 15, "top_k": 8, "verify_tokens": 128}, {"steps": 16}),
    ("dflash", {"block_size": 33, "top_k": 8, "verify_tokens": 32}, {"verify_tokens": 33}),
    ("jetspec", {"block_size": 32, "top_k": 8, "verify_tokens": 128}, {"verify_tokens": 129}),
    ("dspark", {"block_size": 16, "verify_tokens": 17}, {"block_size": 17, "verify_tokens": 18}),
    ("dspark", {"block_size": 15, "top_k": 2, "verify_tokens": 99}, {"block_size": 16}),
]


@pytest.mark.parametrize(("mode", "numbers", "change"), LIMITS)
def test_limits_of_the_reference(mode: str, numbers: dict[str, Any], change: dict[str, Any]) -> None:
    spec(mode, **numbers)
    with pytest.raises(ConfigError, match=r"at most \d+ with kernels of TensorRT Edge-LLM .*has_reference_limits=False"):
        spec(mode, **{**numbers, **change})
    spec(mode, has_reference_limits=False, **{**numbers, **change})


def test_a_chain_of_gemma_may_be_long() -> None:
    assert spec("gemma4_mtp", steps=40).verify_tokens == 41
