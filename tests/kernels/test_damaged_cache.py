"""Damaged files in the build cache cost time and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from numba_kv.device import build_cache

SCRIPT = """
import numpy as np
from numba_kv.device import create_device
from numba_kv.dtypes import dtype
from numba_kv.kernels import on_cpu
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.spec import array

@kernel(a=array("int64"))
def count(item, a):
    a[item] = a[item] + 7

if __name__ == "__main__":
    device = create_device("cpu")
    a = device.tensor((2,), dtype("int64"))
    count.bind(device, {"a": a})(2, device.stream)
    print(a.to_host().tolist(), sum(on_cpu._loops[count].stats.cache_hits.values()))
"""


def start(folder: Path) -> subprocess.Popen[str]:
    script = folder / "counting.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "NUMBA_KV_CACHE_DIR": str(folder / "cache"), "NUMBA_ENABLE_CUDASIM": "0"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    environment.pop("NUMBA_CACHE_DIR", None)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(script)], stdout=pipe, stderr=pipe, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    return out.strip()


def run(folder: Path) -> str:
    return finish(start(folder))


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache that works; every test leaves it so."""
    folder = tmp_path_factory.mktemp("warm")
    assert run(folder) == "[7, 7] 0"
    return folder


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes(b ^ 0xFF for b in content[at : at + 64]) + content[at + 64 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "random": lambda content: bytes(range(256)) * 4,
    "flipped at the start": lambda content: flipped(content, 0),
    "flipped in the middle": lambda content: flipped(content, len(content) // 2),
    "flipped at the end": lambda content: flipped(content, len(content) - 64),
}


def damage_all(folder: Path, pattern: str, damage: Callable[[bytes], bytes]) -> None:
    files = [path for path in (folder / "cache").rglob(pattern) if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(damage(path.read_bytes()))


@pytest.mark.parametrize("pattern", ["*.nbc", "*.nbi"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_machine_code_is_made_again(warm: Path, pattern: str, damage: str) -> None:
    damage_all(warm, pattern, DAMAGES[damage])
    assert run(warm) == "[7, 7] 0"
    assert run(warm) == "[7, 7] 1"


@pytest.mark.parametrize("pattern", ["count_*.py", "*.blake2b"])
def test_damaged_sources_and_checksums_are_made_again(warm: Path, pattern: str) -> None:
    damage_all(warm, pattern, DAMAGES["flipped at the start"])
    assert run(warm).startswith("[7, 7] ")
    assert run(warm) == "[7, 7] 1"


def test_everything_damaged_under_two_processes(warm: Path) -> None:
    damage_all(warm, "*", DAMAGES["truncated"])
    both = [start(warm), start(warm)]
    assert [finish(process)[:6] for process in both] == ["[7, 7]"] * 2
    assert run(warm).startswith("[7, 7] ")  # where the two wrote in turns, this one writes again
    assert run(warm) == "[7, 7] 1"


def test_a_valid_checksum_over_nonsense_heals(warm: Path) -> None:
    """Whatever gets Numba to fail while it loads, the files are made again."""
    damage_all(warm, "*.nbi", DAMAGES["random"])
    folder = next((warm / "cache").iterdir())
    name = next(folder.glob("count_*.py")).stem
    paths = sorted((folder / "__pycache__").glob(f"{name}.loop-*.nb[ic]"))
    parts = [part for path in paths for part in (path.name.encode(), path.read_bytes())]
    (folder / f"{name}.machine_code").write_bytes(build_cache.checksum_of(parts))
    (folder / f"{name}.machine_code.blake2b").write_bytes(
        build_cache.checksum_of([(folder / f"{name}.machine_code").read_bytes()])
    )
    assert run(warm) == "[7, 7] 0"
    assert run(warm) == "[7, 7] 1"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["a.cubin", "a.cubin.blake2b"])
def test_a_damaged_product_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str, name: str) -> None:
    monkeypatch.setenv("NUMBA_KV_CACHE_DIR", str(tmp_path))
    content = bytes(range(256)) * 8
    path = build_cache.write_product("key", "a.cubin", content)
    assert path is not None
    assert path.read_bytes() == content
    assert build_cache.read_product("key", "a.cubin") == content
    file = path.with_name(name)
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    assert build_cache.read_product("key", "a.cubin") is None
    build_cache.write_product("key", "a.cubin", content)
    assert build_cache.read_product("key", "a.cubin") == content


@pytest.mark.parametrize(("entry", "served"), [(b"count_2", b"new"), (b"count_1", b"old count_1")])
def test_machine_code_without_the_entry_that_is_stored_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, entry: bytes, served: bytes
) -> None:
    """Two processes that compile at once may each have stored one of the two products."""
    from numba_kv.kernels import on_cuda
    from numba_kv.kernels.lora_slots import switch_adapter

    stored = {".cubin": b"old count_1", ".entry": entry}
    monkeypatch.setattr(on_cuda, "build_key", lambda: "key")
    monkeypatch.setattr(on_cuda, "product_name", lambda kernel: "count")
    monkeypatch.setattr(on_cuda, "read_product", lambda key, name: stored[name.removeprefix("count")])
    write = stored.__setitem__
    monkeypatch.setattr(on_cuda, "write_product", lambda key, name, content: write(name.removeprefix("count"), content))
    monkeypatch.setattr(on_cuda, "compile_ptx", lambda kernel, capability: "ptx")
    monkeypatch.setattr(on_cuda, "ptx_to_cubin", lambda ptx, capability: (b"new", ""))
    monkeypatch.setattr(on_cuda, "entry_name", lambda ptx: "count_3")
    cubin, name = on_cuda._cubin(switch_adapter, (9, 0))
    assert cubin == stored[".cubin"] == served
    assert name.encode() == stored[".entry"] == (b"count_3" if served == b"new" else b"count_1")
