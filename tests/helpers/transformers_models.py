"""Tiny transformers models with random weights, and generation with and without a paged cache."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
transformers: Any = pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers 5.24 is not installed (pip install 'numba-kv[interop]')"
)

from numba_kv.adapters.transformers import PagedCache  # noqa: E402 - behind what skips where there is no torch

torch.set_num_threads(1)  # what is so small takes many times as long in several, above all on a busy machine
VOCABULARY = 128
WINDOW = 8
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,  # tied weights make a model repeat its input, whatever it attends to
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_HEAD = {"head_dim": 16}
_SLIDING = {"sliding_window": WINDOW}
_TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 2, **_SLIDING}
_GEMMA = {"query_pre_attn_scalar": 16, **_HEAD}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 1 / 3,
}
_SMALL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_SHARED_EXPERT = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 8}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_expand": 2}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 2}

#: Name -> configuration class, model class, what differs from the common sizes.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 2, **_SLIDING}),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", _SHARED_EXPERT),  # states a window of 0
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _HEAD),
    "mistral": ("MistralConfig", "MistralForCausalLM", _SLIDING),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _SLIDING),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_GEMMA, **_TURNS}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_GEMMA, **_TURNS}),
    "gemma3n": ("Gemma3nTextConfig", "Gemma3nForCausalLM", {**_HEAD, **_TURNS, **_PER_LAYER, "laurel_rank": 4}),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", {**_HEAD, **_TURNS, **_PER_LAYER, "global_head_dim": 32}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {**_TURNS, "logit_scale": 1.0}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", _TURNS),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", _TURNS),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**_HEAD, **_TURNS, **_SMALL_EXPERTS, **_ROPE}),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**_HEAD, **_SMALL_EXPERTS, "attention_chunk_size": WINDOW, "floor_scale": 4},  # queries grow with the length
    ),
    "modernbert_decoder": (
        "ModernBertDecoderConfig",
        "ModernBertDecoderForCausalLM",
        {"num_key_value_heads": 4, "local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},  # whose decoder is a head
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"num_key_value_heads": 4}),
}
#: As those, with attention of their own, which has no name: no other can take its place.
NAMELESS_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt_neox_japanese": ("GPTNeoXJapaneseConfig", "GPTNeoXJapaneseForCausalLM", {"num_key_value_heads": 4}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"num_key_value_heads": 4, "n_layer": 4, "n_head": 4}),
}
#: As those: K and V of different sizes, latents in all but the last.
UNEQUAL_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**_LATENT, **_EXPERTS, "first_k_dense_replace": 1}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_LATENT, **_EXPERTS, "first_k_dense_replace": 1}),
    "minicpm3": ("MiniCPM3Config", "MiniCPM3ForCausalLM", _LATENT),
    "longcat_flash": (
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {**_LATENT, "head_dim": 8, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 16, "n_routed_experts": 4}
        | {"zero_expert_num": 2, "moe_topk": 2},
    ),
    "mistral4": (
        "Mistral4Config",
        "Mistral4ForCausalLM",
        {**_LATENT, **_EXPERTS, "kv_lora_rank": 7, "rope_parameters": _YARN},  # an odd sum
    ),
    "youtu": ("YoutuConfig", "YoutuForCausalLM", {**_LATENT, "kv_lora_rank": 4}),  # narrower than the rotated key
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {**_LATENT, **_EXPERTS}),
    "axk1": ("AXK1Config", "AXK1ForCausalLM", {**_LATENT, **_EXPERTS}),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        {**_EXPERTS, **_HEAD, **_TURNS, "v_head_dim": 12, "num_key_value_heads": 1},
    ),
}
#: As those, with layers that have a recurrent state: delta nets, Mamba, Mamba-2 and short convolutions around attention.
HYBRID_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_HEAD, **_DELTA_NET, **_SHARED_EXPERT}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_HEAD, **_DELTA_NET}),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2}
        | {"mamba_d_state": 6, "mamba_d_conv": 4, "mamba_expand": 2},
    ),
    "bamba": ("BambaConfig", "BambaForCausalLM", {**_MAMBA2, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", {**_HEAD, **_MAMBA2, "mamba_d_ssm": 128}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**_MAMBA2, **_SMALL_EXPERTS, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {**_HEAD, "hybrid_override_pattern": "M*-M*", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 12}
        | {"n_groups": 2, "conv_kernel": 4, "expand": 2},
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {**_DELTA_NET, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "zamba2": (
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_d_state": 12}
        | {"mamba_ngroups": 2, "num_mem_blocks": 1, "initializer_range": 0.2},  # with larger weights nobody's sums are near
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention", "full_attention", "conv"], "conv_L_cache": 3, "block_multiple_of": 8},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {**_SHARED_EXPERT, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "num_dense_layers": 1},
    ),
}
#: Those that have no attention but their own.
_EAGER_ONLY = ("gemma2", "gpt_oss", "mimo_v2_flash", "gpt_neox_japanese", "bloom")
#: Those that the simulator has the time for.
FAMILIES_IN_SIM = ("llama", "gemma3")


def place(target: str) -> str:
    """Return where torch has its tensors under a target."""
    return "cuda" if target == "cuda" else "cpu"


def made(config_class: str, model_class: str, extra: dict[str, Any], attention: str = "sdpa", seed: int = 0) -> Any:
    """Return a model of the common sizes, but for what `extra` says, in float32 on the host."""
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**_COMMON, **extra}, attn_implementation=attention)
    return getattr(transformers, model_class)(config).eval()


@cache
def tiny(
    name: str, target: str = "cpu", kind: str = "float32", attention: str = "sdpa", seed: int = 0, noise: float = 0.0
) -> Any:
    """Return a model of a family; equal arguments give equal weights. `noise` makes a bad copy of it."""
    attention = "eager" if name in _EAGER_ONLY else attention
    model = made(*{**FAMILIES, **NAMELESS_FAMILIES, **UNEQUAL_FAMILIES, **HYBRID_FAMILIES}[name], attention, seed)
    with torch.no_grad():
        for weight in model.parameters():
            if noise:
                weight.add_(noise * torch.randn_like(weight))
    return model.to(place(target), getattr(torch, kind)).eval()


def prompt(tokens: int, target: str = "cpu", pads: tuple[int, ...] = (0,), seed: int = 1) -> dict[str, Any]:
    """Return ids and mask of a batch of prompts that are padded to `tokens`, one row for each number of pads."""
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (len(pads), tokens))
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count] = 0
        mask[row, :count] = 0
    return {"input_ids": ids.to(place(target)), "attention_mask": mask.to(place(target))}


def generated(model: Any, inputs: dict[str, Any], tokens: int, **options: Any) -> tuple[Any, Any]:
    """Return the sequences of greedy generation, and the logits of each step [steps, B, vocabulary]."""
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, **options}
    out = model.generate(**inputs, max_new_tokens=tokens, **options)
    return out.sequences, torch.stack(out.logits)


def opened(model: Any, target: str, **limits: Any) -> PagedCache:
    """Return a cache for a model: a small one, where `limits` says nothing else."""
    return PagedCache.for_model(model, **{"max_tokens": 96, "page_tokens": 4, "max_batch": 4, "target": target, **limits})


def opened_paged(model: Any, target: str, **limits: Any) -> PagedCache:
    """Return a cache as `opened`; attention reads its pages."""
    return opened(model, target, attention="paged", **limits)


def not_by_name(monkeypatch: pytest.MonkeyPatch, decoder: Any) -> None:
    """Let a decoder look as if it did not choose its attention by name."""
    monkeypatch.setattr(type(decoder), "_supports_attention_backend", False)
    monkeypatch.delattr(sys.modules[type(decoder).__module__], "ALL_ATTENTION_FUNCTIONS")


def check_same(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    """Check that tokens and logits are the same, bit for bit."""
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1]), f"logits are up to {(found[1] - wanted[1]).abs().max()} apart"


def check_equal(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    """Check that tokens and logits are the same, and that there are enough of them to tell."""
    check_same(found, wanted)
    assert len(found[0][0].unique()) > 4, "the model repeats itself: that proves little"


def check_near(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    """Check that tokens are the same, and logits up to what another order of additions changes."""
    assert torch.equal(found[0], wanted[0])
    apart = float((found[1] - wanted[1]).abs().max())
    assert apart < 1e-3, f"logits are up to {apart} apart"
    assert len(found[0][0].unique()) > 4, "the model repeats itself: that proves little"
