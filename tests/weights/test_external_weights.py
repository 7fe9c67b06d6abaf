"""External weights: loaded, validated and registered once each, and refused without a trace."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from numba_kv.bindings import TensorMap
from numba_kv.device import Device, Memory, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import CapacityError, InputError, NumbaKVError, StateError, UnsupportedModelError, WeightError
from numba_kv.weights import ExternalWeightManager, Shard, Uploader, WeightBinding, WeightInput
from numba_kv.weights.recipes import RECIPES, UNSUPPORTED_RECIPES
from tests.helpers.late_device import staged_device
from tests.helpers.weight_files import KINDS, Taker, values, write, write_shards
from tests.helpers.wrong_weight_files import WRONG

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def device() -> Device:
    return create_device()


@pytest.fixture
def take(device: Device) -> Taker:
    return Taker(device)


@pytest.fixture
def manager(device: Device, take: Taker) -> ExternalWeightManager:
    return ExternalWeightManager(device, take, staging_nbytes=1 << 16)


def inputs_of(arrays: dict[str, np.ndarray]) -> list[WeightInput]:
    names = {np.dtype(kind): kind for kind in KINDS.values()}
    return [WeightInput(name=n, shape=a.shape, dtype=dtype(np.dtype(names[a.dtype]).name)) for n, a in arrays.items()]


def make(manager: ExternalWeightManager, path: Path, arrays: dict[str, np.ndarray], **options: object) -> np.ndarray:
    """Return the weight of one binding that is made of `arrays`."""
    binding = WeightBinding(name="w", keys=tuple(arrays), **options)  # type: ignore[arg-type]
    manager.load(write(path / "made.safetensors", arrays), bindings=[binding])
    return manager.tensors["w"].to_host()


# --- what the files hold


def test_weights_are_the_bytes_that_the_library_reads(tmp_path: Path, manager: ExternalWeightManager) -> None:
    path = tmp_path / "all.safetensors"
    arrays = {f"{kind}.{i}": values(kind, shape, i) for kind in KINDS for i, shape in enumerate([(3, 700), (), (0, 2), (5,)])}
    safetensors.numpy.save_file(arrays, path)
    theirs = {name: bytes(found["data"]) for name, found in safetensors.deserialize(path.read_bytes())}
    manager.load(path)
    assert set(manager.tensors) == set(theirs)
    for name, tensor in manager.tensors.items():
        found = tensor.to_host()
        assert (found.dtype, found.shape) == (arrays[name].dtype, arrays[name].shape)
        assert found.tobytes() == theirs[name]
        assert tensor.address % 256 == 0 or not tensor.size


def test_order_is_that_of_the_file(tmp_path: Path, manager: ExternalWeightManager) -> None:
    manager.load(write(tmp_path / "a.safetensors", {name: np.zeros(3, np.int8) for name in "zma"}))
    assert list(manager.tensors) == ["z", "m", "a"]


def test_shards(tmp_path: Path, manager: ExternalWeightManager) -> None:
    shards = {"1.safetensors": {"a": values("BF16", (9, 5))}, "2.safetensors": {"b": values("F8_E4M3", (7,))}}
    manager.load(write_shards(tmp_path, shards))
    assert manager.tensors["a"].to_host().tobytes() == shards["1.safetensors"]["a"].tobytes()
    assert manager.tensors["b"].to_host().tobytes() == shards["2.safetensors"]["b"].tobytes()


def test_weights_outlive_the_file_and_can_be_saved_over_it(tmp_path: Path, manager: ExternalWeightManager) -> None:
    path = write(tmp_path / "a.safetensors", {"a": np.arange(6, dtype=np.float32)})
    manager.load(path)
    manager.tensors["a"].fill_from(np.arange(6, 12, dtype=np.float32))
    safetensors.numpy.save_file({"a": manager.tensors["a"].to_host()}, path)
    assert safetensors.numpy.load_file(path)["a"].tolist() == [6, 7, 8, 9, 10, 11]
    path.unlink()
    assert manager.tensors["a"].to_host().tolist() == [6, 7, 8, 9, 10, 11]


def test_a_file_without_tensors(tmp_path: Path, manager: ExternalWeightManager) -> None:
    manager.load(write(tmp_path / "none.safetensors", {}, {"format": "pt"}), inputs=[])
    assert not manager.tensors
    manager.register(TensorMap())


def test_tied_weights_share_storage(tmp_path: Path, manager: ExternalWeightManager) -> None:
    path = write(tmp_path / "a.safetensors", {"embed": values("F16", (64, 8)), "norm": values("F16", (8,))})
    manager.load(path, tied={"head": "embed"})
    tensors = manager.tensors
    assert tensors["head"].address == tensors["embed"].address != tensors["norm"].address
    assert list(tensors) == ["embed", "norm", "head"]
    assert manager.nbytes == 1024 + 256


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tied": {"a": "b"}}, "'a' has a tensor of its own in .*a.safetensors"),
        ({"tied": {"c": "d"}}, "'c' shares the memory of 'd', which is missing"),
        ({"required": ["a", "x"]}, "required: 'x' missing"),
    ],
)
def test_names_that_do_not_fit(tmp_path: Path, manager: ExternalWeightManager, options: dict, says: str) -> None:
    path = write(tmp_path / "a.safetensors", {"a": np.zeros(2, np.int8), "b": np.ones(2, np.int8)})
    with pytest.raises(WeightError, match=says):
        manager.load(path, **options)
    assert manager.state == "constructed"


def test_staging_is_all_the_host_memory_that_a_load_takes(tmp_path: Path) -> None:
    device = staged_device()
    take = Taker(device)
    path = write(tmp_path / "a.safetensors", {f"t{i}": values("F16", (256, 1024), i) for i in range(8)})
    with Uploader(device, staging_nbytes=1 << 18, block_nbytes=1 << 16) as uploader:
        with ExternalWeightManager(device, take, uploader=uploader) as manager:
            manager.load(path)
            expected = safetensors.numpy.load_file(path)
            assert all(np.array_equal(t.to_host().view("u2"), expected[n].view("u2")) for n, t in manager.tensors.items())
        assert device.pinned.peak_bytes <= 1 << 18
    assert device.pinned.current_bytes == 0


def test_progress(tmp_path: Path, manager: ExternalWeightManager) -> None:
    seen: list[tuple[int, int]] = []
    manager.load(
        write(tmp_path / "a.safetensors", {"a": values("F32", (5000,))}),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (seen[0], seen[-1]) == ((0, 20_000), (20_000, 20_000))


# --- validation and registration


def arrays_of_two() -> dict[str, np.ndarray]:
    return {"b": values("BF16", (4, 6)), "a": values("F32", (3,))}


def test_from_file_to_bindings(tmp_path: Path, manager: ExternalWeightManager) -> None:
    arrays = arrays_of_two()
    assert manager.state == "constructed"
    manager.load(write(tmp_path / "a.safetensors", arrays))
    assert manager.state == "loaded"
    manager.validate(inputs_of(arrays))
    assert manager.state == "validated"
    first, second = TensorMap(), TensorMap()
    manager.register(first)
    manager.register(second)
    for table in (first, second):
        assert list(table) == ["b", "a"]
        assert table.get("b") is manager.tensors["b"]
    with pytest.raises(StateError, match="'b' is bound in this table already"):
        manager.register(first)


def test_what_is_no_table_is_refused(tmp_path: Path, manager: ExternalWeightManager) -> None:
    arrays = arrays_of_two()
    manager.load(write(tmp_path / "a.safetensors", arrays), inputs=inputs_of(arrays))
    with pytest.raises(InputError, match="table: dict given, without set and remove; a TensorMap"):
        manager.register({})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="table: the class TensorMap given"):
        manager.register(TensorMap)
    manager.register(TensorMap())


def test_a_table_that_has_one_of_the_names_is_left_as_it_is(tmp_path: Path, manager: ExternalWeightManager) -> None:
    arrays = arrays_of_two()
    manager.load(write(tmp_path / "a.safetensors", arrays), inputs=inputs_of(arrays))
    table = TensorMap()
    table.set("a", manager.tensors["a"])
    with pytest.raises(StateError, match="'a' is bound in this table already"):
        manager.register(table)
    assert list(table) == ["a"]


def test_a_table_that_refuses_is_left_as_it_was(tmp_path: Path, manager: ExternalWeightManager) -> None:
    class Refusing(dict):
        def set(self, name: str, tensor: Tensor) -> None:
            if name == "a":
                raise NumbaKVError("no")
            self[name] = tensor

        def remove(self, name: str) -> None:
            del self[name]

    arrays = arrays_of_two()
    manager.load(write(tmp_path / "a.safetensors", arrays), inputs=inputs_of(arrays))
    table = Refusing()
    with pytest.raises(NumbaKVError, match="no"):
        manager.register(table)
    assert not table


def test_each_state_allows_its_own_calls_alone(tmp_path: Path, manager: ExternalWeightManager) -> None:
    arrays = arrays_of_two()
    path = write(tmp_path / "a.safetensors", arrays)
    for call in (lambda: manager.validate([]), lambda: manager.register(TensorMap())):
        with pytest.raises(StateError, match="are constructed"):
            call()
    manager.load(path)
    for call in (lambda: manager.load(path), lambda: manager.register(TensorMap())):
        with pytest.raises(StateError, match="are loaded"):
            call()
    manager.validate(inputs_of(arrays))
    for call in (lambda: manager.load(path), lambda: manager.validate([])):
        with pytest.raises(StateError, match="are validated"):
            call()
    manager.close()
    for call in (
        lambda: manager.load(path),
        lambda: manager.validate([]),
        lambda: manager.register(TensorMap()),
        manager.__enter__,
    ):
        with pytest.raises(StateError, match="closed"):
            call()


@pytest.mark.parametrize("when", ["before", "after"])
def test_missing_extra_and_mismatched_weights_are_named(
    tmp_path: Path, manager: ExternalWeightManager, take: Taker, when: str
) -> None:
    path = write(tmp_path / "a.safetensors", {**arrays_of_two(), "extra": values("I8", (2,)), "kind": values("I8", (2,))})
    declared = [
        WeightInput(name="a", shape=(4,), dtype="float32"),
        WeightInput(name="b", shape=(4, 6), dtype="bf16"),
        WeightInput(name="gone", shape=(1,), dtype="int8"),
        WeightInput(name="kind", shape=(2,), dtype="uint8"),
    ]
    says = r"missing: 'gone'; not declared by the engine: 'extra'; mismatched: 'a' is float32 \[3\], declared as float32 \[4\]"
    if when == "after":
        manager.load(path)
    compare = (lambda: manager.load(path, inputs=declared)) if when == "before" else (lambda: manager.validate(declared))
    with pytest.raises(WeightError, match=says) as caught:
        compare()
    assert (caught.value.missing, caught.value.extra, caught.value.mismatched) == (("gone",), ("extra",), ("a", "kind"))
    assert manager.state == ("constructed" if when == "before" else "loaded")
    assert len(take.taken) == (when == "after")


def test_inputs_that_are_wrong_themselves(manager: ExternalWeightManager, tmp_path: Path) -> None:
    one = WeightInput(name="a", shape=(3,), dtype="int8")
    with pytest.raises(WeightError, match="'a' is declared twice"):
        manager.load(write(tmp_path / "a.safetensors", {}), inputs=[one, WeightInput(name="a", shape=(3,), dtype="int8")])
    for shape in ((-1, 3), (2.5,), 7, (True,)):
        with pytest.raises(WeightError, match="is not static"):
            WeightInput(name="a", shape=shape, dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(WeightError, match="'float31' is not an element type"):
        WeightInput(name="a", shape=(1,), dtype="float31")  # type: ignore[arg-type]
    with pytest.raises(WeightError, match="not the name of a weight"):
        WeightInput(name="", shape=(1,), dtype="int8")  # type: ignore[arg-type]


# --- recipes


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
def test_identity_narrows_to_float16(tmp_path: Path, manager: ExternalWeightManager, kind: str) -> None:
    source = np.array([[1, -2, 3.5], [4, -5.25, 6]], KINDS[kind])
    found = make(manager, tmp_path, {"k": source}, shape=(2, 3), dtype="float16")
    assert found.tolist() == source.astype(np.float32).tolist()


def test_identity_transposes_a_matrix(tmp_path: Path, manager: ExternalWeightManager) -> None:
    source = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    assert make(manager, tmp_path, {"k": source}, shape=(3, 2), dtype="float16").tolist() == [[1, 4], [2, 5], [3, 6]]


def test_identity_takes_the_first_key_that_exists(tmp_path: Path, manager: ExternalWeightManager) -> None:
    path = write(tmp_path / "a.safetensors", {"second": np.array([30, 40], np.float32), "third": np.zeros(2, np.float32)})
    keys = ("first", "second", "third")
    manager.load(path, bindings=[WeightBinding(name="w", shape=(2,), dtype="float32", keys=keys)])
    assert manager.tensors["w"].to_host().tolist() == [30, 40]


def test_embedding_scale(tmp_path: Path, manager: ExternalWeightManager) -> None:
    source = np.array([1, 2, 3, 4], np.float16)
    found = make(manager, tmp_path, {"k": source}, shape=(4,), dtype="float16", embedding_scale=2.0)
    assert found.tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rank", [0, 2])
def test_shards_of_ranks(tmp_path: Path, manager: ExternalWeightManager, kind: str, axis: int, rank: int) -> None:
    source = np.arange(90).reshape(6, 15).astype(KINDS[kind])
    shape = (2, 15) if axis == 0 else (6, 5)
    shard = Shard(axis=axis, size=3, rank=rank)
    found = make(manager, tmp_path, {"k": source}, shape=shape, dtype="float16", shard=shard)
    assert found.tolist() == np.split(source.astype(np.float16), 3, axis)[rank].tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank0_only(tmp_path: Path, manager: ExternalWeightManager, rank: int) -> None:
    source = np.arange(1, 7, dtype=np.float16)
    shard = Shard(axis=0, size=2, rank=rank)
    found = make(manager, tmp_path, {"k": source}, shape=(6,), dtype="float16", shard=shard, rank0_only=True)
    assert found.tolist() == (source if rank == 0 else np.zeros(6)).tolist()


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
def test_cast_to_fp32(tmp_path: Path, manager: ExternalWeightManager, kind: str) -> None:
    source = values(kind, (30, 41)) if kind == "BF16" else np.linspace(-3, 3, 1230).reshape(30, 41).astype(KINDS[kind])
    found = make(manager, tmp_path, {"k": source}, shape=(30, 41), dtype="float32", recipe="cast_to_fp32")
    assert np.array_equal(found, source.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_fill(tmp_path: Path, manager: ExternalWeightManager, value: float) -> None:
    found = make(manager, tmp_path, {}, shape=(7, 300), dtype="float32", recipe="fill", fill_value=value)
    assert (found == value).all()


def test_activation_permutation(tmp_path: Path, manager: ExternalWeightManager) -> None:
    groups = np.array([1, 0, 2, 0, 1, 2], np.int32)
    found = make(
        manager, tmp_path, {"g": groups}, shape=(6,), dtype="int32", recipe="gptq_activation_permutation", group_size=2
    )
    assert found.tolist() == [1, 3, 0, 4, 2, 5]
    assert groups[found].tolist() == [0, 0, 1, 1, 2, 2]


def test_qkv_scales(tmp_path: Path, manager: ExternalWeightManager) -> None:
    parts = {name: np.random.default_rng(i).random((5, width)).astype(np.float16) for i, (name, width) in enumerate(SCALES)}
    found = make(manager, tmp_path, parts, shape=(5, 200), dtype="float16", recipe="gptq_qkv_scales")
    assert np.array_equal(found, np.concatenate(list(parts.values()), axis=1))


SCALES = [("q", 120), ("k", 40), ("v", 40)]


@pytest.mark.parametrize(
    ("each", "reciprocal", "expected"), [(1, False, [1, 4, 2, 8]), (2, False, [4, 8]), (2, True, [0.25, 0.125])]
)
def test_expert_maxima(
    tmp_path: Path, manager: ExternalWeightManager, each: int, reciprocal: bool, expected: list[float]
) -> None:
    scalars = {f"e{i}": np.array(value, np.float32) for i, value in enumerate([1, 4, 2, 8])}
    found = make(
        manager,
        tmp_path,
        scalars,
        shape=(len(expected),),
        dtype="float32",
        recipe="nvfp4_fc1_alpha",
        keys_per_expert=each,
        reciprocal=reciprocal,
    )
    assert found.tolist() == expected


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
@pytest.mark.parametrize(("recipe", "each"), [("fp16_moe_fc1", 2), ("fp16_moe_fc1_relu2", 1), ("fp16_moe_fc2", 1)])
def test_stacked_experts_come_by_name_in_the_order_of_the_keys(
    tmp_path: Path, manager: ExternalWeightManager, kind: str, recipe: str, each: int
) -> None:
    experts = {f"e{i}": np.random.default_rng(i).random((6, 50)).astype(KINDS[kind]) for i in range(4)}
    path = write(tmp_path / "a.safetensors", dict(reversed(experts.items())))  # the file's order is another
    shape = (4 // each, 6 * each, 50)
    manager.load(path, bindings=[WeightBinding(name="w", shape=shape, dtype="float16", recipe=recipe, keys=tuple(experts))])
    found = manager.tensors["w"].to_host()
    assert np.array_equal(found, np.stack(list(experts.values())).astype(np.float16).reshape(shape))


def test_sources_are_never_written(tmp_path: Path, manager: ExternalWeightManager) -> None:
    path = write(tmp_path / "a.safetensors", {"k": np.arange(4, dtype=np.float16)})
    before = path.read_bytes()
    manager.load(path, bindings=[WeightBinding(name="k", shape=(4,), dtype="float16", embedding_scale=3.0)])
    assert path.read_bytes() == before


def test_large_conversions_cross_blocks(tmp_path: Path) -> None:
    device = staged_device()
    take = Taker(device)
    source = np.random.default_rng(0).random((700, 301)).astype(np.float32)
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024) as uploader:
        manager = ExternalWeightManager(device, take, uploader=uploader)
        assert np.array_equal(
            make(manager, tmp_path, {"k": source}, shape=(301, 700), dtype="float16"), source.T.astype(np.float16)
        )


def bind(**options: object) -> WeightBinding:
    return WeightBinding(**{"name": "w", "shape": (2, 3), "dtype": "float16", "keys": ("k",), **options})  # type: ignore[arg-type]


MATRIX, THREE = np.zeros((2, 3), np.float16), np.zeros((5, 4), np.float16)
SINGLE = MATRIX.astype(np.float32)
WRONG_BINDINGS = [
    ("no key exists", bind(keys=("x", "y")), {}, "weight 'w': none of 'x', 'y' is in the checkpoint"),
    ("another type", bind(dtype="float32"), {"k": MATRIX}, "'k' is float16 .*cast_to_fp32"),
    ("another size", bind(shape=(4, 5)), {"k": MATRIX}, r"'k' is float16 \[2, 3\]; shape \[4, 5\]"),
    ("flattened", bind(shape=(6,)), {"k": MATRIX}, r"shape \[6\] is wanted"),
    ("transposed float32", bind(shape=(3, 2), dtype="float32"), {"k": SINGLE}, "transpose of float16"),
    ("scale of float32", bind(dtype="float32", embedding_scale=2.0), {"k": SINGLE}, "embedding_scale is for"),
    ("beyond float16", bind(), {"k": np.full((2, 3), 1e6, np.float32)}, "1000000.0 does not fit float16"),
    ("scaled beyond float16", bind(embedding_scale=1e6), {"k": MATRIX + 1}, "does not fit float16"),
    ("shard of 2 of 3", bind(shape=(1, 3), shard=Shard(axis=1, size=2, rank=0)), {"k": MATRIX}, "1 of 2 shards along axis 1"),
    ("shard of a cube", bind(shard=Shard(axis=1, size=2, rank=0)), {"k": MATRIX.reshape(1, 2, 3)}, "axis 1 of a matrix"),
    ("cast to float16", bind(recipe="cast_to_fp32"), {"k": MATRIX}, "cast_to_fp32 makes float32"),
    ("cast of two", bind(recipe="cast_to_fp32", dtype="float32", keys=("k", "l")), {"k": MATRIX, "l": MATRIX}, "takes 1"),
    ("cast of ints", bind(recipe="cast_to_fp32", dtype="float32"), {"k": np.zeros((2, 3), np.int32)}, "is int32"),
    ("fill of float16", bind(recipe="fill", keys=()), {}, "fill makes float32"),
    ("uneven groups", bind(shape=(4,), dtype="int32", recipe="gptq_activation_permutation", group_size=2),
     {"k": np.array([0, 0, 0, 1], np.int32)}, "does not put 2 rows into each of 2 groups"),
    ("group out of range", bind(shape=(4,), dtype="int32", recipe="gptq_activation_permutation", group_size=2),
     {"k": np.array([0, 0, -1, 7], np.int32)}, "does not put 2 rows"),
    ("group_size", bind(shape=(4,), dtype="int32", recipe="gptq_activation_permutation", group_size=3),
     {"k": np.zeros(4, np.int32)}, "group_size 3 does not divide"),
    ("two scales", bind(recipe="gptq_qkv_scales", keys=("k", "l")), {"k": THREE, "l": THREE}, "those of q, k and v"),
    ("groups differ", bind(recipe="gptq_qkv_scales", keys=("k", "l", "m")),
     {"k": THREE, "l": THREE, "m": MATRIX}, r"\[5, width\]"),
    ("alpha of 0", bind(recipe="nvfp4_fc1_alpha", dtype="float32", shape=(1,)), {"k": np.zeros((), np.float32)}, "above 0"),
    ("alpha of nan", bind(recipe="nvfp4_fc2_alpha", dtype="float32", shape=(1,)), {"k": SINGLE[:1, 0] + np.nan}, "is nan"),
    ("half an expert", bind(recipe="fp16_moe_fc1"), {"k": MATRIX}, "2 an expert are wanted"),
    ("experts differ", bind(recipe="fp16_moe_fc2", keys=("k", "l")), {"k": MATRIX, "l": THREE}, r"one shape, as \[2, 3\]"),
    ("stack's shape", bind(recipe="fp16_moe_fc2"), {"k": MATRIX}, r"fp16_moe_fc2 makes \[1, 2, 3\]"),
    ("unknown recipe", bind(recipe="bake"), {"k": MATRIX}, "recipe 'bake' is unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("binding", "arrays", "says"), [w[1:] for w in WRONG_BINDINGS], ids=[w[0] for w in WRONG_BINDINGS])
def test_a_binding_that_does_not_fit_is_refused_and_nothing_is_kept(
    tmp_path: Path,
    device: Device,
    manager: ExternalWeightManager,
    take: Taker,
    binding: WeightBinding,
    arrays: dict[str, np.ndarray],
    says: str,
) -> None:
    good = WeightBinding(name="good", shape=(4,), dtype="float32")
    path = write(tmp_path / "a.safetensors", {"good": np.zeros(4, np.float32), **arrays})
    with pytest.raises(WeightError, match=says) as caught:
        manager.load(path, bindings=[good, binding])
    assert "'w'" in str(caught.value)
    untouched(manager, take)


@pytest.mark.parametrize("recipe", sorted(UNSUPPORTED_RECIPES))
def test_recipes_for_plugins_are_refused_by_name(tmp_path: Path, manager: ExternalWeightManager, recipe: str) -> None:
    assert recipe not in RECIPES
    path = write(tmp_path / "a.safetensors", {"k": MATRIX})
    with pytest.raises(UnsupportedModelError, match=f"recipe '{recipe}' repacks for a plugin"):
        manager.load(path, bindings=[bind(recipe=recipe)])
    assert manager.state == "constructed"


# --- aliases and roles


def test_an_alias_shares_storage_and_an_embedding_is_no_input(tmp_path: Path, manager: ExternalWeightManager) -> None:
    path = write(tmp_path / "a.safetensors", {"embed": np.arange(12, dtype=np.float16).reshape(4, 3)})
    manager.load(
        path,
        bindings=[
            WeightBinding(name="__embedding__", shape=(4, 3), dtype="float16", keys=("embed",)),
            WeightBinding(name="head", shape=(4, 3), dtype="float16", storage_alias_of="__embedding__"),
        ],
        inputs=[WeightInput(name="head", shape=(4, 3), dtype="float16")],  # type: ignore[arg-type]
    )
    assert manager.embedding is manager.tensors["__embedding__"]
    assert manager.ple_embedding is None
    assert manager.tensors["head"].address == manager.embedding.address
    table = TensorMap()
    manager.register(table)
    assert list(table) == ["head"]


def test_an_embedding_with_an_engine_name_stays_bound(tmp_path: Path, manager: ExternalWeightManager) -> None:
    path = write(tmp_path / "a.safetensors", {"table": MATRIX})
    manager.load(path, bindings=[bind(name="table", keys=(), role="ple_embedding")], inputs=inputs_of({"table": MATRIX}))
    table = TensorMap()
    manager.register(table)
    assert table.get("table") is manager.ple_embedding


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (bind(), "'w' is declared twice"),
        (bind(name="v", storage_alias_of="x"), "not a declared weight"),
        (bind(name="v", storage_alias_of="v"), "is itself"),
        (bind(name="v", storage_alias_of="w", shape=(3, 2)), r"shape \(3, 2\) differs from \(2, 3\)"),
        (bind(name="v", storage_alias_of="w", dtype="float32"), "dtype float32 differs"),
        (bind(name="v", storage_alias_of="w", keys=("other",)), "keys other differ from k"),
        (bind(name="v", storage_alias_of="w", embedding_scale=2.0), "embedding_scale cannot share"),
        (bind(name="__embedding__", role=""), "have the role embedding"),
    ],
)
def test_bindings_that_contradict_each_other(
    tmp_path: Path, manager: ExternalWeightManager, take: Taker, second: WeightBinding, says: str
) -> None:
    path = write(tmp_path / "a.safetensors", {"k": MATRIX, "other": MATRIX})
    with pytest.raises(WeightError, match=says):
        manager.load(path, bindings=[bind(role="embedding"), second])
    untouched(manager, take)


def test_an_alias_of_an_alias() -> None:
    chain = [bind(), bind(name="v", storage_alias_of="w"), bind(name="u", storage_alias_of="v")]
    from numba_kv.weights.binding import check_bindings

    with pytest.raises(WeightError, match="an alias too"):
        check_bindings(chain)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"role": "tail"}, "role 'tail' is not one of"),
        ({"embedding_scale": float("nan")}, "embedding_scale nan is not a finite number"),
        ({"fill_value": float("inf")}, "fill_value inf"),
        ({"rank0_only": True}, "rank0_only needs shard"),
        ({"recipe": "fill", "shard": Shard(axis=0, size=2, rank=0)}, "shard is for the recipe identity"),
        ({"shape": (-1, 3)}, "not static"),
    ],
)
def test_bindings_that_are_wrong_themselves(options: dict[str, object], says: str) -> None:
    with pytest.raises(WeightError, match=says):
        bind(**options)


@pytest.mark.parametrize(("axis", "size", "rank"), [(2, 2, 0), (-1, 2, 0), (0, 1, 0), (0, 2, 2), (0, 2, -1)])
def test_shards_that_are_wrong_themselves(axis: int, size: int, rank: int) -> None:
    with pytest.raises(WeightError, match="shard: axis"):
        Shard(axis=axis, size=size, rank=rank)


# --- refusals leave nothing behind


def untouched(manager: ExternalWeightManager, take: Taker) -> None:
    """Nothing is loaded, nothing is held, and no thread, file or block is left."""
    assert manager.state == "constructed"
    assert not manager.tensors
    assert manager.nbytes == 0
    assert all(memory.is_closed for memory in take.taken)
    assert take.device.memory.current_bytes == 0
    assert take.device.pinned.current_bytes == 0


@pytest.mark.parametrize(("data", "says"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_file_is_refused_and_the_next_one_loads(
    tmp_path: Path, manager: ExternalWeightManager, take: Taker, data: bytes, says: str
) -> None:
    good = write(tmp_path / "good.safetensors", {"good": np.ones(3, np.float32)})
    (tmp_path / "wrong.safetensors").write_bytes(data)
    gc.collect()  # what earlier tests left
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(WeightError, match=f"(?s)wrong.safetensors.*(?:{says})"):
        manager.load(good, tmp_path / "wrong.safetensors")
    untouched(manager, take)
    assert not take.taken
    if sys.platform == "linux":
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before
    manager.load(good)
    assert manager.tensors["good"].to_host().tolist() == [1, 1, 1]


def test_a_file_that_shrinks_while_it_loads(tmp_path: Path, manager: ExternalWeightManager, take: Taker) -> None:
    if os.name != "posix":
        pytest.skip("an open file cannot be shortened on Windows")
    path = write(tmp_path / "a.safetensors", {"a": np.zeros(100_000, np.int8)})

    def shrink(done: int, total: int) -> None:
        if not done:
            os.truncate(path, 50_000)

    with pytest.raises(WeightError, match="truncated while it was read"):
        manager.load(path, progress=shrink)
    untouched(manager, take)


def test_a_device_without_the_memory(tmp_path: Path, device: Device) -> None:
    def take(name: str, nbytes: int) -> Memory:
        assert name == "external_weights"
        raise CapacityError("no memory", needed=nbytes, free=0)

    manager = ExternalWeightManager(device, take)
    with pytest.raises(CapacityError):
        manager.load(write(tmp_path / "a.safetensors", {"a": np.zeros(3, np.int8)}))
    assert manager.state == "constructed"


def test_a_wrong_index_leaves_nothing(tmp_path: Path, manager: ExternalWeightManager, take: Taker) -> None:
    index = write_shards(tmp_path, {"1.safetensors": {"a": MATRIX}, "2.safetensors": {"b": MATRIX}})
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(WeightError, match="2.safetensors: cannot be opened"):
        manager.load(index)
    index.write_text(json.dumps({"weight_map": {"a": "../1.safetensors"}}))
    with pytest.raises(WeightError, match="not a path inside the folder"):
        manager.load(tmp_path)
    untouched(manager, take)


def test_wrong_options_are_refused_before_a_file_is_opened(manager: ExternalWeightManager, tmp_path: Path) -> None:
    for options in ({"progress": 5}, {"check_total_size": "x"}, {"check_total_size": None}):
        with pytest.raises(InputError, match=f"{next(iter(options))}: "):
            manager.load(tmp_path / "nowhere.safetensors", **options)  # type: ignore[arg-type]
    assert manager.state == "constructed"


def test_close_gives_the_memory_back(tmp_path: Path, device: Device, take: Taker) -> None:
    with ExternalWeightManager(device, take) as manager:
        manager.load(write(tmp_path / "a.safetensors", {"a": np.zeros(3, np.int8)}))
        tensor = manager.tensors["a"]
        assert manager.nbytes == device.memory.current_bytes == 256
    manager.close()
    assert manager.state == "closed"
    assert device.memory.current_bytes == 0
    with pytest.raises(StateError, match="given back"):
        tensor.to_host()


def test_bfloat16_needs_no_framework(tmp_path: Path, manager: ExternalWeightManager) -> None:
    source = values("BF16", (33,))
    manager.load(write(tmp_path / "a.safetensors", {"a": source}))
    assert manager.tensors["a"].dtype is dtype("bfloat16")
    assert manager.tensors["a"].to_host().dtype == BF16


def test_the_benchmark_of_loading_runs(tmp_path: Path) -> None:
    from numba_kv.replay.bench_weights import measure_loading

    sizes = [(1 << 20, 1, 1), (1 << 20, 4, 1), (1 << 50, 1, 1)]
    found: Any = measure_loading(checkpoints=sizes, repeat=1, folder=str(tmp_path))["checkpoints"]
    assert [one["files"] for one in found] == [1, 4]  # no disk holds the last
    for one in found:
        assert one["nbytes"] == 1 << 20
        assert one["first_ratio"] > 0
        assert one["first_unannounced_ratio"] > 0
        assert one["later_ratio"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bindings": 5}, "bindings: 5 is not a list of WeightBinding"),
        ({"bindings": [5]}, "bindings: 5 is not a WeightBinding"),
        ({"tied": 5}, "tied: 5 is not a mapping"),
        ({"tied": ["a"]}, "tied: .* is not a mapping"),
        ({"required": "zq"}, "required: 'zq' is not a list of str"),
        ({"required": [None]}, "required: None is not a str"),
        ({"inputs": 5}, "inputs: 5 is not a list of WeightInput"),
        ({"inputs": [5]}, "inputs: 5 is not a WeightInput"),
    ],
)
def test_arguments_that_are_no_lists(tmp_path: Path, manager: ExternalWeightManager, arguments: Any, message: str) -> None:
    path = tmp_path / "model.safetensors"
    write(path, {"a": np.ones(4, np.float32)})
    with pytest.raises(InputError, match=message):
        manager.load(path, **arguments)
    assert (manager.state, manager.nbytes) == ("constructed", 0)
