"""Configurations that ship with the package, by name, and files by path.

Knows where a configuration is found. Does not know what is in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.resources import files

from numba_kv.config.read import parse_json, show
from numba_kv.errors import ConfigError

__all__ = ["builtin_names", "find_config"]


def builtin_names() -> tuple[str, ...]:
    """Return the names of the configurations that ship with the package."""
    folder = files("numba_kv.replay") / "configs"
    return tuple(sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json")))


def find_config(name: str) -> str | Mapping[str, object]:
    """Return what `load_engine_config` takes: the path `name`, or the content of the built-in configuration of that name.

    A file of that name comes first.

    Raises
    ------
    ConfigError
        If there is neither.
    """
    if not name:
        raise ConfigError(f"CONFIG: the name is empty; name a file or a built-in model ({', '.join(builtin_names())})")
    if os.path.exists(name):  # pathlib's raises for names that no file can have
        return name
    if name in builtin_names():
        text = (files("numba_kv.replay") / "configs" / f"{name}.json").read_text(encoding="utf-8")
        content = parse_json(text)
        if isinstance(content, Mapping):
            return content
    raise ConfigError(f"CONFIG: {show(name)} is neither a file nor a built-in model ({', '.join(builtin_names())})")
