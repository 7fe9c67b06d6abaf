"""Which Hugging Face models are refused, and why.

Knows the signs of caches that are not supported yet: a family's name, a layer type, a key. A model that shows one is refused
with the reason before anything else of it is read, since its other keys would mean something else than they seem to.
"""

from __future__ import annotations

from numba_kv.config.huggingface_recurrent import RECURRENT_FAMILIES
from numba_kv.config.read import INT64_MAX, Reader, words

__all__ = ["RECURRENT_LAYER_TYPES", "refuse_unsupported"]

_RECURRENT_FAMILIES = frozenset(
    words(
        """bailing_moe_linear falcon_mamba hymba kimi_linear minimax minimax_m1 minimax_text_01 phi4flash plamo2 recurrent_gemma
        rwkv xlstm zamba"""
    )
)
_RECURRENT_KEYS = (
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "conv_L_cache",
    "full_attention_interval",
    "full_attn_idxs",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "linear_conv_kernel_dim",
    "linear_num_key_heads",
    "lru_width",
    "mamba_d_state",
    "mamba_n_heads",
    "mamba_num_heads",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
)
#: Layer types that keep a state instead of keys and values.
RECURRENT_LAYER_TYPES = frozenset(
    words("linear_attention mamba mamba2 conv recurrent hybrid gated_deltanet sliding_recurrent rwkv")
)
_COMPRESSED_LAYER_TYPES = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
_ENCODER_DECODERS = frozenset(
    words("""bart blenderbot fsmt led longt5 m2m_100 marian mbart mt5 nllb-moe pegasus prophetnet switch_transformers t5 t5gemma
    t5gemma2 umt5 whisper""")
)
_CROSS_ATTENDING = frozenset(words("idefics mllama mllama_text_model moshi musicgen"))
_ENCODERS = frozenset(
    words("""albert bert big_bird camembert clip clip_text_model convbert deberta deberta-v2 distilbert electra ernie eurobert
    longformer modernbert mpnet nomic_bert roberta siglip siglip_text_model siglip_vision_model vit xlm-roberta""")
)
_MLA = "multi-head latent attention keeps one latent per token instead of keys and values per head"


def refuse_unsupported(reader: Reader, family: str) -> None:
    """Refuse a model whose caches are not attention caches of a decoder.

    Parameters
    ----------
    reader : Reader
        The model's configuration or the text part of it.
    family : str
        Family of that part.

    Raises
    ------
    UnsupportedModelError
        Naming the sign that was found, and what is not supported.
    """
    name = f"model_type {family!r}"
    if family in _RECURRENT_FAMILIES:
        raise reader.unsupported(f"{name} has recurrent layers; their states are not supported yet")
    if family in _ENCODER_DECODERS or reader.boolean("is_encoder_decoder", False):
        raise reader.unsupported(f"{name} is an encoder-decoder model; cross attention is not supported yet")
    if family in _CROSS_ATTENDING:
        raise reader.unsupported(f"{name} has cross attention, which is not supported yet")
    if family in _ENCODERS:
        raise reader.unsupported(f"{name} is an encoder, which keeps no KV cache")
    if family not in RECURRENT_FAMILIES:
        _refuse_layer_types(reader, name)
    _refuse_keys(reader, family, name)


def _refuse_layer_types(reader: Reader, name: str) -> None:
    if not reader.has("layer_types"):
        return
    found = set(reader.strings("layer_types"))
    if found & RECURRENT_LAYER_TYPES:
        listed = ", ".join(sorted(found & RECURRENT_LAYER_TYPES))
        raise reader.unsupported(f"layer_types of {name} has recurrent layers ({listed}); their states are not supported yet")
    if found & _COMPRESSED_LAYER_TYPES:
        listed = ", ".join(sorted(found & _COMPRESSED_LAYER_TYPES))
        raise reader.unsupported(f"layer_types of {name} has compressed attention ({listed}), which is not supported yet")


def _refuse_keys(reader: Reader, family: str, name: str) -> None:
    if reader.has("kv_lora_rank"):
        rank = reader.integer("kv_lora_rank", 1)
        instead = "for a transformers model use PagedCache, which stores that latent"
        raise reader.unsupported(f"kv_lora_rank {rank} of {name}: {_MLA}; {instead}")
    for key in _RECURRENT_KEYS:
        if reader.has(key) and family not in RECURRENT_FAMILIES:
            raise reader.unsupported(f"key {reader.key_path(key)!r} of {name} belongs to recurrent layers, not supported yet")
    if reader.boolean("add_cross_attention", False) or (
        reader.has("cross_attention_layers") and reader.items("cross_attention_layers")
    ):
        raise reader.unsupported(f"{name} has cross attention, which is not supported yet")
    if reader.get("use_bidirectional_attention") in (True, "all"):
        raise reader.unsupported(f"use_bidirectional_attention of {name}: every token sees all others, so there is no KV cache")
    if reader.has("block_configs"):
        raise reader.unsupported(f"block_configs of {name}: layers that differ block by block are not supported yet")
    if reader.boolean("use_cla", False):
        raise reader.unsupported(f"use_cla of {name}: cross-layer attention is not supported yet")
    if reader.has("v_head_dim") and reader.has("head_dim"):
        k, v = reader.integer("head_dim", 1, INT64_MAX), reader.integer("v_head_dim", 1, INT64_MAX)
        if k != v:
            raise reader.unsupported(
                f"v_head_dim {v} of {name} is not head_dim {k}; K and V of different size are not supported yet"
            )
