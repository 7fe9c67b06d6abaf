"""Adapters on the host: both layouts, scalings, fused projections, content hashes, converted types."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from numba_kv.dtypes import dtype
from numba_kv.errors import LoRAError
from numba_kv.weights.lora_adapter import HostAdapter, ReadOptions, read_adapter
from numba_kv.weights.lora_matrices import filler
from numba_kv.weights.lora_targets import TargetTable
from tests.helpers.lora_files import FUSED_TARGETS, OUT, QKV, TARGETS, K, Pairs, Q, V, pairs, peft, reference, save, save_peft

TABLE, FUSED_TABLE = TargetTable(TARGETS), TargetTable(FUSED_TARGETS)


def read(source: Any, table: TargetTable = TABLE, **options: Any) -> HostAdapter:
    settings: dict[str, Any] = {"max_rank": 8, "dtype": dtype("float32"), **options}
    adapter = read_adapter(source, table, ReadOptions(**settings))
    adapter.close()
    return adapter


def matrices(adapter: HostAdapter, target: str) -> tuple[np.ndarray, np.ndarray]:
    one = next(m for m in adapter.matrices if m.target.name == target)
    return one.a_rows(one.rank)(0, one.target.k), one.b_rows()(0, one.rank)


def scaled(pair: tuple[np.ndarray, np.ndarray], factor: float) -> tuple[np.ndarray, np.ndarray]:
    return pair[0], (pair[1] * np.float32(factor)).astype(np.float32)


def same(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> bool:
    return all(np.array_equal(f, w) for f, w in zip(found, wanted, strict=True))


def test_layouts_and_sources_of_one_adapter_have_one_hash(tmp_path: Path) -> None:
    given = pairs(Q, V)
    halved = {name: (a, b / 2) for name, (a, b) in given.items()}
    folder = save_peft(tmp_path / "peft", peft(halved))  # alpha / r = 2
    exported = tmp_path / "exported"
    save(exported / "processed_adapter_model.safetensors", reference(given))
    in_memory = {name.replace(".weight", ".default.weight"): array for name, array in peft(halved).items()}
    adapters = [
        read(reference(given)),
        read(save(tmp_path / "adapter.safetensors", reference(given))),
        read(exported),
        read(str(folder)),
        read(folder / "adapter_model.safetensors"),
        read(save_peft(tmp_path / "default", in_memory)),
        read({name.removeprefix("model."): array for name, array in reference(given).items()}),
    ]
    assert len({adapter.content_hash for adapter in adapters}) == 1
    assert len(adapters[0].content_hash) == 16
    assert all(same(matrices(adapter, name), given[name]) for adapter in adapters for name in given)


@pytest.mark.parametrize("half", [0, 1])
def test_one_changed_element_changes_the_hash(half: int) -> None:
    given = pairs(Q, V)
    before = read(reference(given)).content_hash
    given[V][half][1, 1] += 1
    assert read(reference(given)).content_hash != before


def test_what_else_changes_the_hash(tmp_path: Path) -> None:
    given = pairs(K)
    moved = {V: given[K]}
    wider = {K: tuple(np.pad(m, ((0, 1 - i), (0, i))) for i, m in enumerate(reversed(given[K])))}
    wider[K] = (np.pad(given[K][0], ((0, 0), (0, 1))), np.pad(given[K][1], ((0, 1), (0, 0))))
    folder = save_peft(tmp_path / "a", peft(given))
    other = save_peft(tmp_path / "b", peft(given), lora_alpha=9)
    hashes = [
        read(reference(given)).content_hash,
        read(reference(moved)).content_hash,
        read(reference(wider)).content_hash,
        read(reference(given), dtype=dtype("float16")).content_hash,
        *(read(path, fold_scaling=fold).content_hash for path in (folder, other) for fold in (True, False)),
    ]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        ({}, {Q: 2.0, K: 2.0}),
        ({"use_rslora": True}, {Q: 4.0, K: 4.0}),
        ({"lora_alpha": 1}, {Q: 0.25, K: 0.25}),
        ({"lora_alpha": 0.5}, {Q: 0.125, K: 0.125}),
        ({"alpha_pattern": {"q_proj": 1}}, {Q: 0.25, K: 2.0}),
        ({"alpha_pattern": {K: 4}}, {Q: 2.0, K: 1.0}),
        ({"alpha_pattern": {"roj": 4, "[qk]_proj": 1, "k_proj": 9}}, {Q: 0.25, K: 0.25}),
        ({"alpha_pattern": {r"^model\.layers\.0": 1, r"^layers": 9}}, {Q: 0.25, K: 0.25}),
        ({"alpha_pattern": None, "rank_pattern": None, "use_rslora": None, "target_modules": "all-linear"}, {Q: 2.0, K: 2.0}),
        ({"r": 99, "rank_pattern": {"[qk]_proj": 4}}, {Q: 2.0, K: 2.0}),
    ],
)
def test_scalings(tmp_path: Path, config: dict[str, Any], factors: dict[str, float]) -> None:
    given = pairs(Q, K)
    adapter = read(save_peft(tmp_path / "fr", peft(given), **config))
    for name, factor in factors.items():
        assert same(matrices(adapter, name), scaled(given[name], factor))


def test_a_rank_of_its_own_counts_in_the_scaling(tmp_path: Path) -> None:
    given = {**pairs(Q, rank=2), **pairs(V, rank=8)}
    folder = save_peft(tmp_path / "fr", peft(given), rank_pattern={"q_proj": 2, "v_proj": 8}, use_rslora=True)
    adapter = read(folder)
    assert same(matrices(adapter, Q), scaled(given[Q], 8 / math.sqrt(2)))
    assert same(matrices(adapter, V), scaled(given[V], 8 / math.sqrt(8)))


def fused_pairs(rank: int = 4) -> Pairs:
    a = pairs(Q, rank=rank)[Q][0]
    return {QKV: (a, np.hstack([pairs(name, rank=rank, seed=i)[name][1] for i, name in enumerate((Q, K, V))]))}


def test_a_fused_module_is_cut_for_split_targets() -> None:
    given = fused_pairs()
    adapter = read(reference(given))
    for name, columns in ((Q, slice(0, 16)), (K, slice(16, 24)), (V, slice(24, 32))):
        assert same(matrices(adapter, name), (given[QKV][0], given[QKV][1][:, columns]))
    assert [m.rank for m in adapter.matrices] == [4, 4, 4, 0]


def test_parts_of_a_fused_target_keep_their_places_whatever_their_order() -> None:
    """Gate and up, k and v have the same shapes: only the name tells them apart."""
    given = {**pairs(V, rank=1, seed=3), **pairs(K, rank=2, seed=2), **pairs(Q, rank=3, seed=1)}
    adapter = read(reference(given), FUSED_TABLE)
    a, b = matrices(adapter, QKV)
    assert np.array_equal(a, np.hstack([given[Q][0], given[K][0], given[V][0]]))
    wanted = np.zeros((6, 32), np.float32)
    wanted[0:3, 0:16], wanted[3:5, 16:24], wanted[5:6, 24:32] = given[Q][1], given[K][1], given[V][1]
    assert np.array_equal(b, wanted)
    assert adapter.content_hash == read(reference(dict(reversed(given.items()))), FUSED_TABLE).content_hash
    swapped = {**given, K: (given[K][0], given[K][1] * 2)}
    assert adapter.content_hash != read(reference(swapped), FUSED_TABLE).content_hash


def test_scalings_that_differ_within_a_fused_target_go_into_b(tmp_path: Path) -> None:
    given = pairs(Q, V)
    folder = save_peft(tmp_path / "fr", peft(given), alpha_pattern={"v_proj": 1})
    one = read(folder, FUSED_TABLE, fold_scaling=False).matrices[0]
    assert one.scaling == 1.0
    assert [piece.factor for piece in one.pieces] == [2.0, 0.25]
    alike = save_peft(tmp_path / "de", peft(given))
    one = read(alike, FUSED_TABLE, fold_scaling=False).matrices[0]
    assert one.scaling == 2.0
    assert [piece.factor for piece in one.pieces] == [1.0, 1.0]


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_types_are_converted(stored: Any, wanted: str) -> None:
    given = pairs(Q, dtype=stored)
    adapter = read(reference(given), dtype=dtype(wanted))
    a, b = matrices(adapter, Q)
    assert a.dtype == b.dtype == dtype(wanted).numpy()
    assert same((a.astype(np.float64), b.astype(np.float64)), tuple(m.astype(np.float64) for m in given[Q]))
    same_type = np.dtype(stored) == dtype(wanted).numpy()
    if same_type:
        read(reference(given), dtype=dtype(wanted), convert=False)
    else:
        with pytest.raises(LoRAError, match=f"{wanted} is wanted"):
            read(reference(given), dtype=dtype(wanted), convert=False)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("half", [0, 1])
def test_infinities_and_nan_are_refused_unless_asked_for(kind: str, value: float, half: int) -> None:
    given = pairs(Q, K, dtype=dtype(kind).numpy())
    given[K][half][-1, -1] = value
    with pytest.raises(LoRAError, match=rf"k_proj\.lora_{'AB'[half]}.*holds {value}, which is no finite number"):
        read(reference(given), dtype=dtype(kind))
    assert read(reference(given), dtype=dtype(kind), check_finite=False).content_hash


def test_what_does_not_fit_the_type_is_refused_always(tmp_path: Path) -> None:
    given = pairs(Q)
    given[Q][1][2, 3] = 40_000
    assert read(reference(given), dtype=dtype("float16")).content_hash
    folder = save_peft(tmp_path / "fr", peft(given))
    for check in (True, False):
        with pytest.raises(LoRAError, match="holds 40000, which times the scaling 2 does not fit float16"):
            read(folder, dtype=dtype("float16"), check_finite=check)
    given[Q][0][0, 0] = 1e30
    given[Q][0][1, 0] = math.nan
    with pytest.raises(LoRAError, match=r"lora_A.*holds 1e\+30, which does not fit float16"):
        read(reference(given), dtype=dtype("float16"), check_finite=False)


def test_loading_leaves_the_given_arrays_alone() -> None:
    given = reference(pairs(Q, K, V, OUT))
    before = {name: array.copy() for name, array in given.items()}
    for array in given.values():
        array.setflags(write=False)
    read(given)
    read(given, FUSED_TABLE)
    assert all(np.array_equal(given[name], array) for name, array in before.items())


@pytest.mark.parametrize("window", [256, 512, 4096])
def test_ranges_that_begin_and_end_inside_a_row(window: int) -> None:
    one = read(reference(pairs(Q, rank=5))).matrices[0]
    for rows, width, height in ((one.a_rows(8), 8, 12), (one.b_rows(), 16, 8)):
        fill, whole = filler(rows, width, dtype("float32")), rows(0, height).tobytes()
        found = np.zeros(len(whole), np.uint8)
        for begin in range(0, len(whole), window):
            fill(found[begin : begin + window], begin)
        assert found.tobytes() == whole
