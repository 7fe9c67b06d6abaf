"""Sources of a configuration: paths, directories, mappings, damaged files; and the arguments beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from numba_kv.config import load_engine_config
from numba_kv.errors import ConfigError
from tests.helpers.configs import edgellm, huggingface


@pytest.mark.parametrize("make", [huggingface, edgellm])
def test_file_directory_and_mapping_are_the_same(tmp_path: Path, make: Callable[[], dict[str, Any]]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(make()), encoding="utf-8")
    expected = load_engine_config(make())
    assert load_engine_config(path) == load_engine_config(str(path)) == load_engine_config(tmp_path) == expected
    assert hash(load_engine_config(path)) == hash(expected)


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(huggingface()), encoding="utf-8-sig")
    assert load_engine_config(path).model_type == "llama"


def test_the_source_is_not_changed() -> None:
    source = huggingface("gpt2", text_config=huggingface("mistral"))
    before = json.dumps(source)
    load_engine_config(source)
    assert json.dumps(source) == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        json.dumps(huggingface()).encode()[:-9],
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"not json",
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "damaged.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged\.json"):
        load_engine_config(path)


@pytest.mark.parametrize("content", ["[]", "null", "3", '"text"', "[{}]"])
def test_the_top_level_must_be_an_object(tmp_path: Path, content: str) -> None:
    path = tmp_path / "list.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"list\.json: .* is not an object"):
        load_engine_config(path)


@pytest.mark.parametrize("name", ["absent.json", "\0", ""])
def test_files_that_cannot_be_opened(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_engine_config(name)


@pytest.mark.parametrize("source", [3, None, [], b"config.json"])
def test_sources_of_the_wrong_type(source: Any) -> None:
    with pytest.raises(ConfigError, match="source"):
        load_engine_config(source)


@pytest.mark.parametrize("make", [huggingface, edgellm])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"page_tokens": 3}, ("page_tokens", "3", "power of two")),
        ({"page_tokens": 512}, ("page_tokens", "512")),
        ({"page_tokens": 0}, ("page_tokens", "0")),
        ({"page_tokens": 16.0}, ("page_tokens", "16.0")),
        ({"page_tokens": True}, ("page_tokens", "True")),
        ({"max_batch_size": 0}, ("max_batch_size", "0")),
        ({"max_batch_size": True}, ("max_batch_size", "true")),
        ({"max_batch_size": "8"}, ("max_batch_size", "'8'")),
        ({"max_kv_cache_capacity": -1}, ("max_kv_cache_capacity", "-1")),
        ({"max_kv_cache_capacity": 2**31}, ("max_kv_cache_capacity", "2147483648")),
        ({"max_kv_cache_capacity": 100.5}, ("max_kv_cache_capacity", "100.5")),
        ({"kv_cache_dtype": "int8"}, ("kv_cache_dtype", "'int8'", "float16")),
        ({"kv_cache_dtype": "fp4"}, ("kv_cache_dtype", "'fp4'")),
        ({"kv_cache_dtype": 16}, ("kv_cache_dtype", "16")),
        ({"kv_layout": "NDH"}, ("kv_layout", "'NDH'", "NHD, HND")),
        ({"kv_layout": ("HND", 1)}, ("kv_layout", "NHD, HND")),
        ({"kv_layout": ("HND",) * 9}, ("kv_layout: 9 layouts given", "full")),
        ({"kv_layout": None}, ("kv_layout", "NHD, HND")),
        ({"max_step_tokens": 0}, ("max_step_tokens", "0")),
        ({"max_step_tokens": 5000}, ("max_step_tokens", "5000")),
        ({"max_batch_tokens": 1}, ("max_batch_tokens", "1", "max_batch_size")),
        ({"max_batch_tokens": -1}, ("max_batch_tokens", "-1")),
        ({"num_kv_pages": 0}, ("num_kv_pages", "0")),
        ({"num_kv_pages": 2**30}, ("num_kv_pages", "1073741824")),
        ({"lookahead_pages": -1}, ("lookahead_pages", "-1")),
        ({"use_bounded_swa": 1}, ("use_bounded_swa", "1")),
        ({"rank": -1}, ("rank", "-1")),
        ({"expected_world_size": 0}, ("expected_world_size", "0")),
    ],
)
def test_bad_arguments(make: Callable[[], dict[str, Any]], arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(make(), **arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("arguments", [{"rank": 1}, {"expected_world_size": 2}])
def test_whole_models_have_no_ranks(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="rank"):
        load_engine_config(huggingface(), **arguments)
    assert load_engine_config(huggingface(), rank=0, expected_world_size=1).max_batch_size == 16


@pytest.mark.parametrize("make", [huggingface, edgellm])
def test_room_for_reuse_is_asked_for(make: Callable[[], dict[str, Any]]) -> None:
    asked = load_engine_config(make(), kept_window_pages=7, kept_states=3)
    assert (asked.kept_window_pages, asked.kept_states) == (7, 3)
    plain = load_engine_config(make())
    assert (plain.kept_window_pages, plain.kept_states) == (0, 0)
    for name in ("kept_window_pages", "kept_states"):
        for wrong in (-1, 1.5, True, None):
            with pytest.raises(ConfigError, match=name):
                load_engine_config(make(), **{name: wrong})
