"""Loading a speculative pair from two files of the Edge-LLM dialect."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from numba_kv.config import FULL, DeploymentConfig, Window, load_deployment_config, load_engine_config
from numba_kv.config.spec_decode import SPEC_MODES
from numba_kv.errors import ConfigError, UnsupportedModelError
from tests.helpers.configs import ABSENT, MAMBA, edgellm, huggingface, per_layer
from tests.helpers.deployments import base_file, draft_file
from tests.host.test_config_fuzz import anything, places

STEPS = {"mtp": 3, "eagle3": 3, "gemma4_mtp": 3}


def load(
    mode: str = "mtp", base: dict[str, Any] | None = None, draft: dict[str, Any] | None = None, **numbers: Any
) -> DeploymentConfig:
    if mode in STEPS:
        numbers = {"steps": STEPS[mode], **numbers}
    return load_deployment_config(base_file(mode, **(base or {})), draft_file(mode, **(draft or {})), **numbers)


@pytest.mark.parametrize("mode", SPEC_MODES)
def test_a_pair_of_each_mode(mode: str) -> None:
    found = load(mode)
    assert found.spec is not None
    assert found.draft is not None
    assert found.spec.mode == mode
    assert (found.spec.max_verify_tokens, found.spec.max_draft_tokens) == (16, 16)
    assert (len(found.base.layers), len(found.draft.layers)) == (12, 2)
    assert found.spec.base_hidden_size == found.base_output_hidden_size == (3 * 768 if mode == "eagle3" else 768)
    expected = {"eagle3": (0, 5, 11), "dflash": (1, 3), "jetspec": (1,), "dspark": (2,)}
    assert found.spec.target_layers == expected.get(mode, ())
    assert found.spec.block_size == {"dflash": 8, "jetspec": 4, "dspark": 7}.get(mode, 0)
    assert found.spec.target_kv_layers == ((10, 11) if mode == "gemma4_mtp" else ())


@pytest.mark.parametrize("mode", SPEC_MODES)
def test_rows_of_the_base_leave_room_for_proposals(mode: str) -> None:
    """Both files say 256. The draft's rows hold the proposals of a round behind every row of the base."""
    found = load(mode)
    assert found.spec is not None
    assert found.draft is not None
    assert found.draft.max_kv_cache_capacity == 256
    room = 0 if mode == "gemma4_mtp" else found.spec.draft_tokens
    assert found.base.max_kv_cache_capacity == 256 - room
    assert found.base.num_kv_pages == 4  # of the engine, as its file says


def test_a_draft_with_longer_rows_leaves_the_base_as_it_is() -> None:
    longer = {"builder": {"max_kv_cache_capacity": 300, "max_kv_pool_pages": 6}}
    assert load(draft=longer).base.max_kv_cache_capacity == 256
    assert load(max_kv_cache_capacity=250).base.max_kv_cache_capacity == 250
    with pytest.raises(ConfigError, match="256 of the draft is below 257: 254 of the base and 3 proposals"):
        load(max_kv_cache_capacity=254)


def test_files_are_read_too(tmp_path: Path) -> None:
    paths = []
    for name, content in (("base", base_file()), ("draft", draft_file())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        paths.append(tmp_path / name)
    assert load_deployment_config(*paths, steps=3) == load()
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read"):
        load_deployment_config(paths[0], tmp_path / "nowhere.json", steps=3)


def test_limits_of_both() -> None:
    found = load(
        page_tokens=16,
        kv_cache_dtype="float8_e4m3",
        kv_layout="HND",
        max_batch_size=1,
        lookahead_pages=2,
        use_bounded_swa=False,
    )
    assert found.draft is not None
    for config in (found.base, found.draft):
        assert (config.page_tokens, config.kv_cache_dtype, config.max_batch_size) == (16, "float8_e4m3", 1)
        assert (config.lookahead_pages, config.use_bounded_swa, config.kv_layouts) == (2, False, ("HND",))


def test_tokens_of_a_step_hold_the_width_of_a_role() -> None:
    """Tokens of a row: the longest prompt (128), or the role's width where that is more."""
    assert load(base={"builder": {"max_verify_tree_size": 129}}).base.max_batch_tokens == 258
    assert load(base={"builder": {"max_verify_tree_size": 140, "max_input_len": 160}}).base.max_batch_tokens == 320
    for width, tokens in ((128, 256), (129, 258), (140, 280)):
        found = load(draft={"builder": {"max_draft_tree_size": width}})
        assert found.draft is not None
        assert found.draft.max_batch_tokens == tokens
    anchored = {"dspark_config": {"target_layer_ids": [2], "sample_from_anchor": False}}
    found = load("dspark", draft={**anchored, "builder": {"max_input_len": 8}})
    assert found.draft is not None
    assert found.draft.max_batch_tokens == 2 * 17
    with pytest.raises(ConfigError, match="2147483647 leaves no room for the anchor"):
        load("dspark", draft={**anchored, "builder": {"max_draft_tree_size": 2**31 - 1}})


def test_windows_in_both() -> None:
    """The reference refuses windows beside a draft."""
    windows = {"builder": {"num_swa_pages": 64}, **per_layer(0, 64, 128)}
    found = load(base=windows, draft=windows)
    assert found.draft is not None
    for config in (found.base, found.draft):
        assert [layer.window for layer in config.layers] == [FULL, Window("sliding", 64), Window("sliding", 128)]
    flagged = {**windows, "builder": {"num_swa_pages": 64, "spec_base": True}, "mtp_base": True}
    assert load(base=flagged).base == found.base
    with pytest.raises(ConfigError, match="num_swa_pages: 13 is not at least 14"):
        load(base={"builder": {"num_swa_pages": 13}, **per_layer(0, 129)})


def test_the_vocabulary_of_a_draft() -> None:
    for keys, expected in (({}, 32000), ({"draft_vocab_size": 500}, 500), ({"vocab_size": ABSENT}, 0)):
        found = load(draft=keys)
        assert found.draft is not None
        assert found.draft.vocab_size == expected


def test_ranks_apply_to_both() -> None:
    """The reference applies them to the base alone."""
    overrides = [{"rank": rank, "config_overrides": {"num_key_value_heads": heads}} for rank, heads in ((0, 2), (1, 1))]
    ranked = {"builder": {"tp_size": 2}, "rank_configs": overrides}
    found = load(base=ranked, draft=ranked, rank=1, expected_world_size=2)
    assert found.draft is not None
    assert {layer.num_kv_heads for layer in (*found.base.layers, *found.draft.layers)} == {1}


def test_states_of_a_hybrid_base() -> None:
    base = {"num_linear_attn_layers": 2, "num_attention_layers": 10, **MAMBA}
    found = load(base=base, recurrent_state_dtype="bfloat16", conv_state_room=5)
    assert found.base.recurrent_layer is not None
    assert found.base.recurrent_layer.recurrent_state_dtype == "bfloat16"
    assert found.base.conv_state_room == 5
    assert found.engine_configs()[0].max_verify_tokens == 16


def test_a_base_alone() -> None:
    assert load_deployment_config(edgellm()) == DeploymentConfig(base=load_engine_config(edgellm()))
    with pytest.raises(ConfigError, match="draft: missing, but steps, verify_tokens, top_k given"):
        load_deployment_config(edgellm(), steps=3, verify_tokens=4, top_k=2)
    with pytest.raises(UnsupportedModelError, match="load_deployment_config loads the engines of a speculative pair"):
        load_deployment_config(base_file())


def test_the_second_version_of_dflash() -> None:
    ids = {"version": 2, "target_layer_ids": [1, 3, 5, 7, 11], "block_size": 8}
    base, draft = {"dflash_config": ids}, {"dflash_config": ids, "num_hidden_layers": 5}
    found = load("dflash", base=base, draft=draft)
    assert found.spec is not None
    assert found.spec.target_layers == (1, 3, 5, 7, 11)
    for section, words in (
        ({"target_layer_ids": [1, 3, 5, 7]}, "target_layer_ids: 4 layers; version 2 requires 5"),
        ({"target_layer_ids": [1, 3, 5, 7, 7]}, r"target_layer_ids\[4\]: 7"),
        ({"block_size": 17}, "block_size: 17 is not from 2 to 16"),
        ({"selector_rank": 128}, "selector_rank: 128"),
        ({"is_causal": True}, "is_causal: true is not false"),
        ({"supports_probabilistic_sampling": False}, "supports_probabilistic_sampling: false is not true"),
        ({"version": 3}, "version: 3 is not"),
    ):
        with pytest.raises(ConfigError, match=words):
            load("dflash", base={"dflash_config": {**ids, **section}}, draft=draft)
    with pytest.raises(ConfigError, match="a draft of 5 layers, not 2"):
        load("dflash", base=base, draft={"dflash_config": ids})
    with pytest.raises(ConfigError, match=r"dflash_config\.version: 1 is not 2, as the base has it"):
        load("dflash", base=base)


def test_where_jetspec_states_its_keys() -> None:
    places: list[dict[str, Any]] = [
        {"jetspec_config": {"target_layer_ids": [1], "block_size": 6}, "dflash_config": {"target_layer_ids": [2]}},
        {"jetspec_config": ABSENT, "dflash_config": {"target_layer_ids": [1], "block_size": 6}},
        {"jetspec_config": ABSENT, "dflash_config": ABSENT, "target_layer_ids": [1], "block_size": 6},
    ]
    for keys in places:
        found = load("jetspec", draft=keys)
        assert found.spec is not None
        assert found.spec.block_size == 6
    unstated = load("jetspec", draft={"dflash_config": {"target_layer_ids": [1]}})
    assert unstated.spec is not None
    assert unstated.spec.block_size == 16
    assert load("jetspec", block_size=3).spec.block_size == 3  # type: ignore[union-attr]


BAD: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ("mtp", {"engine_role": "llm"}, {}, ("base (Edge-LLM)", "spec_decode_type: 'mtp'")),
    ("mtp", {"engine_role": "draft"}, {}, ("engine_role: 'draft' is not 'base'",)),
    ("mtp", {}, {"engine_role": "base"}, ("draft (Edge-LLM)", "engine_role: 'base' is not 'draft'")),
    ("mtp", {"spec_decode_type": "none"}, {}, ("spec_decode_type: 'none'", "'base'")),
    ("mtp", {}, {"spec_decode_type": "eagle3"}, ("spec_decode_type: 'eagle3' is not 'mtp', as the base has it",)),
    ("mtp", {"builder": {"max_verify_tree_size": ABSENT}}, {}, ("builder_config.max_verify_tree_size: missing",)),
    ("mtp", {"builder": {"max_verify_tree_size": 0}}, {}, ("max_verify_tree_size: 0",)),
    ("mtp", {"builder": {"max_verify_tree_size": 3}}, {}, ("verify_tokens: 4", "max_verify_tokens 3")),
    ("mtp", {}, {"builder": {"max_draft_tree_size": ABSENT}}, ("builder_config.max_draft_tree_size: missing",)),
    ("mtp", {}, {"builder": {"max_draft_tree_size": 2}}, ("steps: 3", "max_draft_tokens 2")),
    ("mtp", {}, {"base_model_hidden_size": ABSENT}, ("base_model_hidden_size: missing",)),
    ("mtp", {}, {"base_model_hidden_size": 1024}, ("base_hidden_size: 1024 is not 768",)),
    ("mtp", {}, {"draft_vocab_size": 32001}, ("32001 tokens", "32000")),
    ("mtp", {}, {"draft_vocabsize": 5}, ("draft_vocabsize", "did you mean 'draft_vocab_size'")),
    ("mtp", {}, {"num_linear_attn_layers": 1, **MAMBA}, ("draft: 1 recurrent layers",)),
    ("eagle3", {"eagle_hidden_state_layers": [0, 5, 12]}, {}, ("eagle_hidden_state_layers[2]: 12",)),
    ("eagle3", {"eagle_hidden_state_layers": [0, 5, 5]}, {}, ("eagle_hidden_state_layers[2]: 5",)),
    ("eagle3", {"eagle_hidden_state_layers": ABSENT}, {}, ("target_layers: empty",)),
    ("eagle3", {"eagle_hidden_state_layers": [0, 5]}, {}, ("base_hidden_size: 2304 is not 1536",)),
    ("dflash", {"dflash_config": ABSENT}, {}, ("dflash_config: missing",)),
    ("dflash", {"dflash_config": {"target_layer_ids": []}}, {}, ("target_layer_ids: []",)),
    ("dflash", {"dflash_config": {"target_layer_ids": [12]}}, {}, ("target_layer_ids[0]: 12",)),
    ("dflash", {"dflash_config": {"target_layer_ids": [1, 2]}}, {}, ("target_layer_ids: [1, 3] is not [1, 2]",)),
    ("dflash", {"dflash_config": {"target_layer_ids": [1], "mask_token_id": -1}}, {}, ("mask_token_id: -1",)),
    ("jetspec", {"jetspec_config": {"target_layer_ids": [1], "causal_head": False}}, {}, ("causal_head: false",)),
    ("dspark", {"dspark_config": {"target_layer_ids": [2], "markov_rank": -1}}, {}, ("markov_rank: -1",)),
    ("gemma4_mtp", {"model": "gemma3"}, {}, ("model: 'gemma3'", "'gemma4_unified'")),
    ("gemma4_mtp", {"base_model_hidden_size": 5}, {}, ("base_model_hidden_size: 5", "hidden_size 768")),
    ("gemma4_mtp", {}, {"model": "gemma4"}, ("model: 'gemma4' is not 'gemma4_assistant'",)),
    ("gemma4_mtp", {}, {"shares_target_kv": False}, ("shares_target_kv: false is not true",)),
    ("gemma4_mtp", {}, {"has_own_kv_cache": ABSENT}, ("has_own_kv_cache: true is not false",)),
    ("gemma4_mtp", {}, {"returns_feedback_hidden": False}, ("returns_feedback_hidden",)),
    ("gemma4_mtp", {}, {"constant_draft_positions": False}, ("constant_draft_positions",)),
    ("gemma4_mtp", {}, {"assistant_hidden_size": 5}, ("assistant_hidden_size: 5",)),
    ("gemma4_mtp", {}, {"kv_sharing_map": ABSENT}, ("kv_sharing_map: missing",)),
    ("gemma4_mtp", {}, {"kv_sharing_map": []}, ("target_kv_layers: 0 entries for 2",)),
    (
        "gemma4_mtp",
        {},
        {"kv_sharing_map": [{"assistant_layer": 0, "target_attention_layer": 1}] * 2},
        ("kv_sharing_map", "[0, 0]"),
    ),
    ("gemma4_mtp", {}, {"kv_sharing_map": [{"assistant_layer": 0}]}, ("kv_sharing_map[0].target_attention_layer: missing",)),
    ("gemma4_mtp", {}, {"head_dim": 32}, ("4 heads x 64", "4 x 32")),
    ("gemma4_mtp", {}, {"vocab_size": 100}, ("vocab_size: 100 of the draft is not 32000",)),
    ("gemma4_mtp", {}, {"builder": {"max_kv_pool_pages": 5}}, ("num_kv_pages: 5 of the draft is not 4",)),
]


@pytest.mark.parametrize(("mode", "base", "draft", "words"), BAD)
def test_pairs_that_are_wrong(mode: str, base: dict[str, Any], draft: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(mode, base, draft)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("mode", ["mtp", "eagle3", "gemma4_mtp"])
def test_steps_have_no_default(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"steps: missing; '{mode}' drafts step by step"):
        load_deployment_config(base_file(mode), draft_file(mode))


def test_other_dialects_are_refused() -> None:
    with pytest.raises(ConfigError, match="draft: no builder_config"):
        load_deployment_config(base_file(), huggingface(), steps=3)


SPARE = {"builder": {"max_kv_pool_pages": 9}}


@pytest.mark.parametrize("mode", SPEC_MODES)
def test_spare_pages(mode: str) -> None:
    """An engine may have more pages than all rows take where the reference keeps them for later requests."""
    more = {"builder": {"max_kv_pool_pages": 10}}
    if mode in ("eagle3", "dflash", "jetspec", "dspark"):
        found = load(mode, SPARE, more)
        assert found.draft is not None
        assert (found.base.num_kv_pages, found.draft.num_kv_pages) == (9, 10)
        return
    if mode == "gemma4_mtp":
        with pytest.raises(ConfigError, match=r"draft .*max_kv_pool_pages: 9 is not 4"):
            load(mode, SPARE, SPARE)
    else:
        with pytest.raises(ConfigError, match=r"base .*max_kv_pool_pages: 9 is not 4"):
            load(mode, SPARE)
        with pytest.raises(ConfigError, match=r"draft .*max_kv_pool_pages: 9 is not 4"):
            load(mode, {}, SPARE)
    assert load(mode, SPARE, SPARE, has_reference_limits=False).base.num_kv_pages == 9


def test_spare_pages_beside_recurrent_layers() -> None:
    base = {"num_linear_attn_layers": 2, "num_attention_layers": 10, **MAMBA, **SPARE}
    with pytest.raises(ConfigError, match=r"base .*max_kv_pool_pages: 9 is not 4"):
        load("eagle3", base)


@pytest.mark.parametrize(
    ("numbers", "base", "words"),
    [
        ({"top_k": 9, "steps": 1, "verify_tokens": 12}, {}, "top_k is 9, at most 8"),
        ({"steps": 16}, {"builder": {"max_verify_tree_size": 17}}, "steps is 16, at most 15"),
        (
            {"top_k": 8, "steps": 2, "verify_tokens": 65},
            {"builder": {"max_verify_tree_size": 65}, "num_linear_attn_layers": 2, "num_attention_layers": 10, **MAMBA},
            "verify_tokens: 65 is above 64",
        ),
    ],
)
def test_limits_that_the_reference_states(numbers: dict[str, Any], base: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load("mtp", base, **numbers)
    load("mtp", base, has_reference_limits=False, **numbers)


@given(data=st.data(), mode=st.sampled_from(SPEC_MODES), changes=st.integers(1, 3))
def test_values_replaced_by_anything(data: st.DataObject, mode: str, changes: int) -> None:
    """Whatever the files hold, the outcome is a deployment or a ConfigError."""
    files = copy.deepcopy([base_file(mode), draft_file(mode)])
    for _ in range(changes):
        container, key = data.draw(st.sampled_from([place for file in files for place in places(file)]))
        container[key] = data.draw(anything)
    try:
        found = load_deployment_config(*files, steps=STEPS.get(mode), top_k=data.draw(st.sampled_from([1, 1, 2])))
    except ConfigError:
        return
    assert found.spec is not None
    assert found.engine_configs()[0].max_step_tokens >= found.spec.verify_tokens
