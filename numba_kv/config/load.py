"""Loading a configuration: a path or a mapping, in either dialect.

Knows how a file is opened and how its dialect is told. Knows no other key: the dialects do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from numba_kv.config.edgellm import read_edgellm
from numba_kv.config.engine import LLMEngineConfig
from numba_kv.config.huggingface import read_huggingface
from numba_kv.config.limits import Limits
from numba_kv.config.read import Reader, check_regular, parse_json, show, show_path
from numba_kv.errors import ConfigError

__all__ = ["edgellm_reader", "is_edgellm", "load_engine_config", "read_source"]

#: The first two decide. The others exist in no Transformers model, so a file that has one is a damaged file of the reference.
_EDGELLM_KEYS = ("builder_config", "edgellm_version", "engine_role", "kv_layer_configs", "spec_decode_type")
#: Configurations have some kilobytes.
_MOST_BYTES = 16 << 20


def load_engine_config(
    source: str | os.PathLike[str] | Mapping[str, object],
    *,
    max_batch_size: int | None = None,
    max_kv_cache_capacity: int | None = None,
    page_tokens: int | None = None,
    kv_cache_dtype: str | None = None,
    kv_layout: str | tuple[str, ...] = "NHD",
    max_step_tokens: int = 1,
    max_batch_tokens: int | None = None,
    num_kv_pages: int | None = None,
    lookahead_pages: int = 4,
    use_bounded_swa: bool = True,
    recurrent_state_dtype: str | None = None,
    conv_state_dtype: str | None = None,
    max_verify_tokens: int = 0,
    recurrent_spec_verify_mode: str | None = None,
    conv_state_room: int = 1,
    kept_window_pages: int = 0,
    kept_states: int = 0,
    rank: int | None = None,
    expected_world_size: int | None = None,
) -> LLMEngineConfig:
    """Load what a model's caches are from its ``config.json``, in the Hugging Face or the TensorRT Edge-LLM dialect.

    Parameters
    ----------
    source : path or mapping
        The file, a directory with a ``config.json``, or the parsed content. It is of the Edge-LLM dialect if it has
        ``builder_config`` or ``edgellm_version``.
    max_batch_size : int or None
        Rows. None: what the file says; 16 in the Hugging Face dialect.
    max_kv_cache_capacity : int or None
        Most tokens of a row. None: what the file says; its ``max_position_embeddings`` in the Hugging Face dialect.
    page_tokens : int or None
        Tokens of a page, a power of two from 1 to 256. None: 16, or 128 in the Edge-LLM dialect.
    kv_cache_dtype : str or None
        Element type of the pools. None: what the file says, else bfloat16.
    kv_layout : str or tuple of str
        How a page lies, "NHD" or "HND", for all window groups or each; see `LLMEngineConfig`.
    max_step_tokens : int
        Most tokens of a step with every key readable from pages; see `LLMEngineConfig`.
    max_batch_tokens : int or None
        Most tokens of all rows in one step. None: 8192, or rows x ``max_input_len`` in the Edge-LLM dialect.
    num_kv_pages : int or None
        Usable pages of the full-attention pool. None: every row at full length, or the Edge-LLM file's pool.
    lookahead_pages : int
        Pages that a full-attention row is mapped ahead of its length.
    use_bounded_swa : bool
        Whether window layers live in rings.
    recurrent_state_dtype, conv_state_dtype : str or None
        Element types of recurrent states: float32, float16 or bfloat16. None: what the file says; in the Hugging Face dialect
        float32, and the type of the weights, where it says nothing.
    max_verify_tokens : int
        Most tokens of a row that a verification step runs; 0: recurrent layers need nothing to commit from.
    recurrent_spec_verify_mode : str or None
        "snapshot" or "replay"; see `LLMEngineConfig`. None: what the file says, else "snapshot".
    conv_state_room : int
        Columns of a convolution state beyond those that the next token reads; see `LLMEngineConfig`.
    kept_window_pages, kept_states : int
        Room for reuse of context: pages of each window group, and snapshots of recurrent states; see `LLMEngineConfig`.
    rank, expected_world_size : int or None
        Tensor-parallel rank whose overrides are applied, and how many ranks there must be (Edge-LLM dialect).

    Returns
    -------
    LLMEngineConfig
        Checked throughout.

    Raises
    ------
    ConfigError
        If the file cannot be read or is not JSON, or if a key or an argument is missing, of the wrong type or out of range.
    UnsupportedModelError
        If the model is understood but its caches are not supported yet.

    Notes
    -----
    A window larger than the capacity means full attention in the Hugging Face dialect, where the model sees the same keys
    either way, and is refused in the Edge-LLM dialect, where it contradicts what the engine was built with.
    """
    limits = Limits(
        max_batch_size=max_batch_size,
        max_kv_cache_capacity=max_kv_cache_capacity,
        page_tokens=page_tokens,
        kv_cache_dtype=kv_cache_dtype,
        kv_layout=kv_layout,
        max_step_tokens=max_step_tokens,
        max_batch_tokens=max_batch_tokens,
        num_kv_pages=num_kv_pages,
        lookahead_pages=lookahead_pages,
        use_bounded_swa=use_bounded_swa,
        recurrent_state_dtype=recurrent_state_dtype,
        conv_state_dtype=conv_state_dtype,
        max_verify_tokens=max_verify_tokens,
        recurrent_spec_verify_mode=recurrent_spec_verify_mode,
        conv_state_room=conv_state_room,
        kept_window_pages=kept_window_pages,
        kept_states=kept_states,
        rank=rank,
        expected_world_size=expected_world_size,
    )
    name, content = read_source(source, "config")
    if is_edgellm(content):
        return read_edgellm(edgellm_reader(name, content), limits)
    return read_huggingface(Reader(f"{name} (Hugging Face)", content, null_is_absent=True), limits)


def is_edgellm(content: Mapping[str, object]) -> bool:
    """Return whether a configuration is of the Edge-LLM dialect."""
    return any(key in content for key in _EDGELLM_KEYS)


def edgellm_reader(name: str, content: Mapping[str, object]) -> Reader:
    """Return a reader of a configuration of the Edge-LLM dialect."""
    return Reader(f"{name} (Edge-LLM)", content, null_is_absent=False)


def read_source(source: str | os.PathLike[str] | Mapping[str, object], name: str) -> tuple[str, Mapping[str, object]]:
    """Return what messages call a configuration, `name` if it is no file, and its content.

    Raises
    ------
    ConfigError
        If it cannot be read, or is not one JSON object.
    """
    name, content = (name, source) if isinstance(source, Mapping) else _read_file(source)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{name}: {show(content)} is not an object; a model configuration is one JSON object")
    return name, content


def _read_file(source: str | os.PathLike[str]) -> tuple[str, object]:
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"source: {show(source)} is not a path or a mapping")
    name = os.fspath(source)
    if not name:
        raise ConfigError(
            "source: an empty path cannot be read; name a config.json, or '.' for the one in the working directory"
        )
    label = show_path(name)
    try:
        path = Path(name)
        file = path / "config.json" if path.is_dir() else path
        check_regular(file)
        with file.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise OSError(f"it is larger than {_MOST_BYTES >> 20} MiB; a model's config.json has some kilobytes")
        text = content.decode("utf-8-sig")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{label}: cannot be read: {error}") from error
    try:
        return label, parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{label}: is not JSON: {error}") from error
