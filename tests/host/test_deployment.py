"""DeploymentConfig: what base and draft must agree on, and what each is planned for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import numba_kv as kv
from numba_kv.config import DeploymentConfig, LLMEngineConfig, Mamba2Layer, RopeConfig
from numba_kv.config.spec_decode import SPEC_MODES
from numba_kv.errors import ConfigError
from tests.helpers.deployments import pair, spec
from tests.helpers.models import tiny_config

BASE = tiny_config(None, 8, hidden_size=16, vocab_size=100)
DRAFT = tiny_config(None, max_kv_cache_capacity=67)
MAMBA = Mamba2Layer(num_heads=2, head_dim=4, state_size=8, conv_dim=16, conv_kernel=4)


def hybrid(**changes: Any) -> LLMEngineConfig:
    """Return a base of an attention layer and a recurrent one."""
    return tiny_config(None, layer_types=("attention", "recurrent"), recurrent_layer=MAMBA, **changes)


def mrope(**changes: Any) -> RopeConfig:
    values = {"theta": 1e4, "rotary_dim": 8, "max_position_embeddings": 64, "parameters": {"mrope_section": [2, 1, 1]}}
    return RopeConfig(rope_type="mrope", **{**values, **changes})


@pytest.mark.parametrize("mode", SPEC_MODES)
def test_a_pair_of_each_mode(mode: str) -> None:
    found = pair(mode)
    assert found.shares_target_kv == (mode == "gemma4_mtp")
    assert found.max_accepted_tokens == 4
    assert found.max_runtime_batch_size == 2
    configs = found.engine_configs()
    assert len(configs) == (1 if mode == "gemma4_mtp" else 2)
    assert configs[0] == replace(found.base, max_step_tokens=4)
    for config in configs[1:]:
        assert config == replace(found.draft, max_step_tokens=found.spec.draft_tokens + 1)  # type: ignore[arg-type, union-attr]


def test_a_base_alone() -> None:
    found = DeploymentConfig(base=BASE)
    assert (found.max_accepted_tokens, found.max_runtime_batch_size, found.shares_target_kv) == (1, 2, False)
    assert found.engine_configs() == (BASE,)
    assert found.draft_ropes() == ()
    assert found.base_output_hidden_size == 16
    assert found.zero_buffer_nbytes() == 256


def test_what_is_planned_is_never_less_than_what_was_asked_for() -> None:
    found = pair(base=replace(BASE, max_step_tokens=9, max_batch_tokens=64))
    assert [(c.max_step_tokens, c.max_batch_tokens) for c in found.engine_configs()] == [(9, 64), (9, 64)]
    wide = pair(steps=15, base=replace(BASE, max_batch_size=6, max_batch_tokens=6))
    assert [(c.max_step_tokens, c.max_batch_tokens) for c in wide.engine_configs()] == [(16, 96), (16, 96)]
    assert [(c.max_batch_size, c.max_batch_tokens) for c in wide.engine_configs(2)] == [(2, 32), (2, 32)]
    tree = pair("eagle3", steps=2, top_k=3, verify_tokens=4, target_layers=(0, 1))
    assert [c.max_step_tokens for c in tree.engine_configs()] == [4, 7]
    shallow = pair("dspark", block_size=2, top_k=2, verify_tokens=9)
    assert [c.max_step_tokens for c in shallow.engine_configs()] == [9, 9]  # a draft catches up with all that may be kept


def test_rows_are_those_that_both_have() -> None:
    found = pair(draft=replace(DRAFT, max_batch_size=5), base=replace(BASE, max_batch_size=3))
    assert found.max_runtime_batch_size == 3
    assert [c.max_batch_size for c in found.engine_configs()] == [3, 3]
    assert [c.max_batch_size for c in found.engine_configs(1)] == [1, 1]
    for wrong in (0, 4, True, 2.0, "2"):
        with pytest.raises(ConfigError, match="max_runtime_batch_size: "):
            found.engine_configs(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="max_runtime_batch_size: "):
            found.zero_buffer_nbytes(wrong)  # type: ignore[arg-type]


def test_adapters_and_weights_belong_to_the_base() -> None:
    targets = (kv.LoRATarget(name="q_proj", k=4, n=4),)
    owner = {"max_lora_rank": 4, "lora_targets": targets, "external_weights_nbytes": 100, "num_deepstack_features": 2}
    base, draft = pair(base=replace(BASE, **owner), draft=replace(DRAFT, **owner)).engine_configs()
    assert {name: getattr(base, name) for name in owner} == owner
    assert (draft.max_lora_rank, draft.lora_targets, draft.external_weights_nbytes, draft.num_deepstack_features) == (
        0,
        (),
        0,
        0,
    )


def test_the_zero_buffer() -> None:
    """The larger of deep-stack inputs of a verification step in half precision, and a word a proposal; 256 bytes at least."""
    assert pair().zero_buffer_nbytes() == 256
    assert pair(max_draft_tokens=100).zero_buffer_nbytes() == 2 * 100 * 4
    assert pair(max_draft_tokens=100).zero_buffer_nbytes(1) == 400
    assert pair(max_verify_tokens=900).zero_buffer_nbytes() == 256  # what is verified counts, not the width
    deep = replace(BASE, hidden_size=1024, num_deepstack_features=3)
    assert pair(base=deep).zero_buffer_nbytes() == 2 * 4 * 1024 * 2
    assert DeploymentConfig(base=deep).zero_buffer_nbytes() == 2 * 1024 * 2


@pytest.mark.parametrize(("mode", "tokens"), [("mtp", 9), ("eagle3", 9), ("dspark", 9), ("dflash", 4), ("jetspec", 4)])
def test_states_of_a_verification_are_kept_for_recurrent_layers(mode: str, tokens: int) -> None:
    numbers = {"max_verify_tokens": 9}
    draft = tiny_config(None, max_kv_cache_capacity=70)
    assert pair(mode, base=hybrid(), draft=draft, **numbers).engine_configs()[0].max_verify_tokens == tokens
    assert pair(mode, base=hybrid(max_verify_tokens=12), draft=draft, **numbers).engine_configs()[0].max_verify_tokens == 12
    assert pair(mode, **numbers).engine_configs()[0].max_verify_tokens == 0


def test_a_multimodal_draft_has_the_rotation_of_its_base() -> None:
    found = pair(base=replace(BASE, ropes=(mrope(),)), draft=replace(DRAFT, ropes=(mrope(max_position_embeddings=9),)))
    assert found.draft_ropes() == (mrope(),)
    plain = RopeConfig(rope_type="default", theta=1e4, rotary_dim=8, max_position_embeddings=64)
    assert pair(base=replace(BASE, ropes=(mrope(),)), draft=replace(DRAFT, ropes=(plain,))).draft_ropes() == (plain,)


# -- what is refused

SHARED = tiny_config(None, hidden_size=16, vocab_size=100)
# mode, changes of base, draft (None: as `pair` makes it) and round; what the message has to say
BAD: list[tuple[str, Any, Any, dict[str, Any], tuple[str, ...]]] = [
    ("mtp", {}, {"max_kv_cache_capacity": 66}, {}, ("max_kv_cache_capacity: 66", "below 67", "64 of the base and 3 proposals")),
    ("mtp", {}, {"max_kv_cache_capacity": 64}, {}, ("max_kv_cache_capacity: 64", "67")),
    ("eagle3", {}, {}, {"top_k": 2, "verify_tokens": 4}, ("67 of the draft is below 70",)),
    ("dspark", {}, {}, {"samples_from_anchor": False}, ("67 of the draft is below 68",)),
    ("mtp", {}, {"num_kv_pages": 31}, {}, ("num_kv_pages: 31 pages of 4", "128 tokens", "32 pages of 4")),
    ("mtp", {"num_kv_pages": 20}, {"num_kv_pages": 19}, {}, ("num_kv_pages: 19", "80 tokens", "20 pages of 4")),
    ("mtp", {}, {"num_kv_pages": 7, "page_tokens": 16}, {}, ("num_kv_pages: 7 pages of 16", "128 tokens")),
    ("mtp", {"max_kv_cache_capacity": 2}, {}, {}, ("verify_tokens: 4", "max_kv_cache_capacity 2")),
    ("mtp", {}, {"layers": (), "layer_types": ("none",)}, {}, ("draft: no attention layers",)),
    ("mtp", {}, {"layer_types": ("attention", "recurrent"), "recurrent_layer": MAMBA}, {}, ("draft: 1 recurrent layers",)),
    ("mtp", {}, {"vocab_size": 101}, {}, ("vocab_size", "101", "100")),
    ("mtp", {}, {}, {"base_hidden_size": 32}, ("base_hidden_size: 32 is not 16",)),
    ("mtp", {}, {"vocab_size": 2}, {"top_k": 3, "verify_tokens": 4, "steps": 1}, ("top_k: 3", "2 tokens")),
    (
        "mtp",
        {},
        {"reduced_vocab_size": 50},
        {"top_k": 2, "verify_tokens": 4, "steps": 1},
        ("reduced_vocab_size: 50 of the draft",),
    ),
    (
        "mtp",
        {"reduced_vocab_size": 50},
        {},
        {"top_k": 2, "verify_tokens": 4, "steps": 1},
        ("reduced_vocab_size: 50 of the base",),
    ),
    (
        "eagle3",
        {},
        {},
        {"base_hidden_size": 16, "target_layers": (0, 1)},
        ("base_hidden_size: 16 is not 32", "2 target_layers"),
    ),
    ("eagle3", {}, {}, {"target_layers": (0, 2)}, ("target_layers[1]: 2", "2 layers")),
    ("dflash", {}, {"max_kv_cache_capacity": 68}, {"base_hidden_size": 48, "target_layers": (0, 1)}, ("48 is not 16 or 32",)),
    ("mtp", {}, {"ropes": (mrope(),)}, {}, ("ropes", "multimodal")),
    ("mtp", {"ropes": (mrope(),)}, {"ropes": (mrope(theta=1e5),)}, {}, ("ropes", "multimodal")),
    ("mtp", {"ropes": (mrope(),)}, {"ropes": (mrope(parameters={"mrope_section": [1, 1, 2]}),)}, {}, ("ropes", "multimodal")),
    ("gemma4_mtp", {}, {"vocab_size": 99}, {}, ("vocab_size: 99", "100")),
    ("gemma4_mtp", {}, {"kv_cache_dtype": "float16"}, {}, ("kv_cache_dtype: float16", "bfloat16")),
    ("gemma4_mtp", {}, {"page_tokens": 8}, {}, ("page_tokens: 8", "4")),
    ("gemma4_mtp", {}, {"num_kv_pages": 40}, {}, ("num_kv_pages: 40", "None")),
    ("gemma4_mtp", {}, {"use_bounded_swa": False}, {}, ("use_bounded_swa: False",)),
    ("gemma4_mtp", {}, {"kv_layout": "HND"}, {}, ("target_kv_layers[0]: ", "kept as NHD", "as HND")),
    ("gemma4_mtp", {}, {"max_kv_cache_capacity": 68}, {}, ("max_kv_cache_capacity: 17 pages", "16")),
    ("gemma4_mtp", {}, {}, {"target_kv_layers": ()}, ("target_kv_layers: 0 entries for 1",)),
    ("gemma4_mtp", {}, {}, {"target_kv_layers": (2,)}, ("target_kv_layers[0]: 2", "2 attention layers")),
    ("gemma4_mtp", {}, {}, {"target_kv_layers": (1,)}, ("target_kv_layers[0]: 1", "sliding 8", "full")),
    ("gemma4_mtp", {}, {"layers": tiny_config(None, heads=(2, 8)).layers}, {}, ("1 heads x 8", "2 x 8")),
]


@pytest.mark.parametrize(("mode", "base", "draft", "numbers", "words"), BAD)
def test_pairs_that_do_not_fit(
    mode: str, base: dict[str, Any], draft: dict[str, Any], numbers: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        pair(mode, base=replace(BASE, **base), draft=replace(SHARED if mode == "gemma4_mtp" else DRAFT, **draft), **numbers)
    for word in words:
        assert word in str(caught.value)


def test_pools_need_not_be_equal() -> None:
    pair(base=replace(BASE, num_kv_pages=36), draft=replace(DRAFT, num_kv_pages=40))
    pair(base=replace(BASE, num_kv_pages=40), draft=replace(DRAFT, num_kv_pages=36))  # spare pages count for nothing
    pair(base=replace(BASE, num_kv_pages=20), draft=replace(DRAFT, num_kv_pages=20))


def test_the_members_are_checked() -> None:
    numbers = spec()
    wrong: list[tuple[Callable[[], DeploymentConfig], str]] = [
        (lambda: DeploymentConfig(base={}), "base: dict is not an LLMEngineConfig"),  # type: ignore[arg-type]
        (lambda: DeploymentConfig(base=BASE, draft=3, spec=numbers), "draft: int is not"),  # type: ignore[arg-type]
        (lambda: DeploymentConfig(base=BASE, draft=DRAFT, spec="mtp"), "spec: str is not"),  # type: ignore[arg-type]
        (lambda: DeploymentConfig(base=BASE, draft=DRAFT), "spec: missing"),
        (lambda: DeploymentConfig(base=BASE, spec=numbers), "draft: missing"),
    ]
    for call, message in wrong:
        with pytest.raises(ConfigError, match=message):
            call()


RECURRENT_LIMITS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("mtp", {"top_k": 8, "steps": 1, "verify_tokens": 65}, {"verify_tokens": 64}, "verify_tokens: 65 is above 64"),
    ("dflash", {"block_size": 17}, {"block_size": 16}, "block_size: 17 is above 16"),
    ("jetspec", {"block_size": 8, "top_k": 2, "verify_tokens": 65}, {"verify_tokens": 64}, "verify_tokens: 65 is above 64"),
]


@pytest.mark.parametrize(("mode", "numbers", "change", "message"), RECURRENT_LIMITS)
def test_limits_of_the_reference_for_recurrent_layers(
    mode: str, numbers: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    base, draft = hybrid(max_kv_cache_capacity=128), tiny_config(None, max_kv_cache_capacity=256)
    with pytest.raises(ConfigError, match=message):
        pair(mode, base=base, draft=draft, **numbers)
    pair(mode, base=base, draft=draft, has_reference_limits=False, **numbers)
    pair(mode, base=base, draft=draft, **{**numbers, **change})
    pair(mode, base=tiny_config(None, max_kv_cache_capacity=128), draft=draft, **numbers)


def test_a_base_that_replays_verifies_its_whole_width() -> None:
    base, draft = hybrid(recurrent_spec_verify_mode="replay"), tiny_config(None, max_kv_cache_capacity=256)
    tree = {"top_k": 2, "verify_tokens": 8, "max_verify_tokens": 9}
    with pytest.raises(ConfigError, match="verify_tokens: 8 is not max_verify_tokens 9"):
        pair("dspark", base=base, draft=draft, **tree)
    pair("dspark", base=base, draft=draft, **{**tree, "max_verify_tokens": 8})
    pair("dspark", base=base, draft=draft, has_reference_limits=False, **tree)
    pair("dspark", base=hybrid(), draft=draft, **tree)


def test_two_rotations_of_a_block_draft() -> None:
    two = tuple(RopeConfig(rope_type="default", theta=t, rotary_dim=8, max_position_embeddings=64) for t in (1e4, 1e6))
    draft = tiny_config(None, max_kv_cache_capacity=68, ropes=two)
    with pytest.raises(ConfigError, match="ropes: the draft has 2"):
        pair("dflash", base=BASE, draft=draft)
    assert pair("dflash", base=BASE, draft=draft, has_reference_limits=False).draft_ropes() == two
    assert pair("mtp", base=BASE, draft=draft).draft_ropes() == two
