"""TensorMap: what may be bound, bound again, read and frozen, and what a refusal leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import numba_kv as kv
from numba_kv.bindings import TensorMapView
from numba_kv.device import Device, Tensor, create_device
from numba_kv.errors import InputError, ShapeError, StateError
from numba_kv.weights import ExternalWeightManager, TensorTable, WeightInput


@pytest.fixture
def device() -> Iterator[Device]:
    found = create_device()
    yield found
    found.stream.close()


def tensor(device: Device, *shape: int, dtype: str = "int32") -> Tensor:
    return device.tensor(shape, kv.dtype(dtype))


def test_names_come_in_the_order_in_which_they_were_bound(device: Device) -> None:
    tensors = kv.TensorMap()
    bound = {name: tensor(device, 2) for name in ("logits", "w.b", "w.a", "positions")}
    for name, value in bound.items():
        tensors.set(name, value)
    assert list(tensors) == list(tensors.keys()) == list(bound)
    assert dict(tensors.items()) == dict(tensors) == bound
    assert len(tensors) == 4
    assert "w.a" in tensors
    assert "w.c" not in tensors
    assert tensors["w.a"] is tensors.get("w.a") is bound["w.a"]
    assert tensors.missing(["w.c", "w.a", "x"]) == ("w.c", "x")
    tensors.rebind("logits", tensor(device, 3))
    assert list(tensors) == list(bound)
    tensors.remove("w.b")
    assert list(tensors) == ["logits", "w.a", "positions"]
    assert repr(tensors) == "TensorMap(3 names)"


def test_a_name_is_bound_once(device: Device) -> None:
    tensors = kv.TensorMap()
    first = tensor(device, 2)
    for name in ("logits", "weight"):
        tensors.set(name, first)
    with pytest.raises(InputError, match=r"'weight' is bound already, to Tensor\(int32, \[2\], \w+\)$"):
        tensors.set("weight", first)
    with pytest.raises(InputError, match="'logits' is bound already.*; rebind"):
        tensors.set("logits", tensor(device, 2))
    assert tensors["logits"] is tensors["weight"] is first


def test_a_missing_name_is_told_with_a_similar_one(device: Device) -> None:
    tensors = kv.TensorMap()
    with pytest.raises(InputError, match="'logits' is not bound; 0 names are"):
        tensors.get("logits")
    tensors.set("kv_page_table", tensor(device, 2))
    for call in (tensors.get, tensors.remove, lambda name: tensors.rebind(name, tensor(device, 2))):
        with pytest.raises(InputError, match=r"'kv_page_tabel' is not bound; did you mean 'kv_page_table'\?"):
            call("kv_page_tabel")
        with pytest.raises(InputError, match="'zzz' is not bound; 1 names are"):
            call("zzz")
    for name in (3, None, ["kv_page_table"]):
        with pytest.raises(InputError, match="is not bound"):
            tensors[name]  # type: ignore[index]


@pytest.mark.parametrize("call", ["set", "rebind", "update"])
def test_what_is_no_binding(device: Device, call: str) -> None:
    tensors = kv.TensorMap()
    tensors.set("logits", tensor(device, 2))
    before = dict(tensors)

    def attempt(name: object, value: object) -> None:
        if call == "update":
            tensors.update({"logits": tensor(device, 3), name: value})  # type: ignore[dict-item]
        else:
            getattr(tensors, call)(name, value)

    for name in ("", 3, None):
        with pytest.raises(InputError, match="is not the name of a binding"):
            attempt(name, tensor(device, 2))
    for value in (np.zeros(2, np.int32), None, 7):
        with pytest.raises(InputError, match="is not a Tensor"):
            attempt("positions", value)
    gone = tensor(device, 2)
    gone._memory.close(device.stream)
    with pytest.raises(StateError, match="given back"):
        attempt("positions", gone)
    assert dict(tensors) == before


def test_tensors_of_one_device_alone(device: Device) -> None:
    class Elsewhere(Tensor):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 7

    here = tensor(device, 2)
    there = Elsewhere(here._memory, device, here.dtype, here.shape)
    tensors = kv.TensorMap()
    with pytest.raises(InputError, match=r"w2: the tensor is on .*, the others are on"):
        tensors.update({"w1": here, "w2": there})
    assert not len(tensors)
    tensors.set("w1", there)
    with pytest.raises(InputError, match="w2: the tensor is on"):
        tensors.set("w2", here)


def test_empty_tensors_can_be_bound(device: Device) -> None:
    tensors = kv.TensorMap()
    tensors.update({"swa_kv_cache_mode": tensor(device, 1, dtype="int8")[:0], "weight": tensor(device, 3)})
    assert tensors["swa_kv_cache_mode"].shape == (0,)
    tensors.set("scalar", tensor(device))
    assert tensors["scalar"].shape == ()


# -- binding again


def test_pools_and_weights_are_bound_for_good(device: Device) -> None:
    pool = tensor(device, 4, 3)
    tensors = kv.TensorMap()
    tensors.set("past_key_values_0", pool)
    tensors.rebind("past_key_values_0", pool[:])  # the same place once more
    for other in (tensor(device, 4, 3), pool[:2]):
        with pytest.raises(InputError, match="past_key_values_0: bound to .* for good"):
            tensors.rebind("past_key_values_0", other)
    tensors.remove("past_key_values_0")
    tensors.set("past_key_values_0", tensor(device, 1))


def test_inputs_of_a_step_change_their_first_extent_alone(device: Device) -> None:
    table = tensor(device, 4, 2, 8)
    tensors = kv.TensorMap()
    tensors.set("kv_page_table", table[:2])
    tensors.rebind("kv_page_table", table[:4])
    assert tensors["kv_page_table"].shape == (4, 2, 8)
    with pytest.raises(InputError, match="kv_page_table: an input of a step keeps its address"):
        tensors.rebind("kv_page_table", tensor(device, 4, 2, 8))
    for wrong in (table[:, :, :4], table[:, 0], table[::2]):
        with pytest.raises(ShapeError, match="only the first extent may change"):
            tensors.rebind("kv_page_table", wrong)
    same_place = Tensor(table._memory, device, kv.dtype("float32"), table.shape)
    with pytest.raises(ShapeError, match="float32 given, int32 bound"):
        tensors.rebind("kv_page_table", same_place)
    assert tensors["kv_page_table"].shape == (4, 2, 8)


def test_activations_and_adapters_change_all_but_their_type(device: Device) -> None:
    tensors = kv.TensorMap()
    for name in ("inputs_embeds", "q_proj.lora_A", "deepstack_embeds_1", "rope_rotary_cos_sin"):
        tensors.set(name, tensor(device, 2, 3))
        other = tensor(device, 7)
        tensors.rebind(name, other)
        assert tensors[name] is other
        with pytest.raises(ShapeError, match=f"{name}: int8 given, int32 bound; the element type stays"):
            tensors.rebind(name, tensor(device, 7, dtype="int8"))


def test_an_update_is_all_or_nothing(device: Device) -> None:
    tensors = kv.TensorMap()
    tensors.update({"weight": tensor(device, 2), "logits": tensor(device, 2)})
    before = dict(tensors)
    with pytest.raises(InputError, match="weight: bound"):
        tensors.update({"logits": tensor(device, 5), "new": tensor(device, 1), "weight": tensor(device, 2)})
    assert dict(tensors) == before
    tensors.update({"logits": tensor(device, 5), "new": tensor(device, 1), "weight": before["weight"]})
    assert list(tensors) == ["weight", "logits", "new"]
    tensors.update({})
    kv.TensorMap().update({})


# -- reading, freezing, closing


def test_a_frozen_map_follows_and_cannot_be_changed(device: Device) -> None:
    tensors = kv.TensorMap()
    frozen = tensors.frozen()
    tensors.set("logits", tensor(device, 2))
    assert frozen["logits"] is tensors["logits"]
    assert list(frozen) == ["logits"]
    assert type(frozen) is TensorMapView
    for change in ("set", "rebind", "remove", "update", "close"):
        assert not hasattr(frozen, change)
    assert repr(frozen) == "TensorMapView(1 names)"
    tensors.close()
    with pytest.raises(StateError, match="TensorMap is closed"):
        frozen.get("logits")
    assert frozen.is_closed


def test_a_snapshot_tells_what_has_changed(device: Device) -> None:
    tensors = kv.TensorMap()
    table, logits = tensor(device, 4, 2, 8), tensor(device, 3)
    tensors.update({"kv_page_table": table[:2], "logits": logits, "weight": tensor(device, 1)})
    then = tensors.snapshot()
    assert list(then.tensors) == list(tensors)
    assert then.tensors["kv_page_table"].address == table.address
    assert then.tensors["kv_page_table"].shape == (2, 2, 8)
    assert then.tensors["kv_page_table"].strides == (16, 8, 1)
    assert then == tensors.snapshot()
    with pytest.raises(TypeError):
        then.tensors["logits"] = None  # type: ignore[index]
    tensors.set("more", tensor(device, 1))
    tensors.rebind("logits", logits[:])
    assert tensors.changes_since(then) == ()
    tensors.rebind("kv_page_table", table[:3])
    tensors.rebind("logits", tensor(device, 3))
    tensors.remove("weight")
    assert tensors.changes_since(then) == tensors.frozen().changes_since(then) == ("kv_page_table", "logits", "weight")


def test_a_closed_map_refuses_everything_and_gives_no_memory_back(device: Device) -> None:
    bound = tensor(device, 2)
    held = device.memory.current_bytes
    with kv.TensorMap() as tensors:
        tensors.set("logits", bound)
        then = tensors.snapshot()
    tensors.close()
    assert device.memory.current_bytes == held
    assert bound.to_host().tolist() == [0, 0]
    assert repr(tensors) == "TensorMap(closed)"
    for call in (
        lambda: tensors["logits"],
        lambda: list(tensors),
        lambda: len(tensors),
        lambda: "logits" in tensors,
        lambda: tensors.items(),
        lambda: tensors.missing(["logits"]),
        lambda: tensors.set("logits", bound),
        lambda: tensors.rebind("logits", bound),
        lambda: tensors.update({}),
        lambda: tensors.remove("logits"),
        lambda: tensors.snapshot(),
        lambda: tensors.changes_since(then),
        lambda: tensors.__enter__(),
    ):
        with pytest.raises(StateError, match="the TensorMap is closed"):
            call()


def test_memory_that_was_given_back_is_told_by_name(device: Device) -> None:
    tensors = kv.TensorMap()
    tensors.set("weight", tensor(device, 2))
    tensors["weight"]._memory.close(device.stream)
    with pytest.raises(StateError, match="weight: the tensor's memory has been given back"):
        tensors.get("weight")
    tensors.remove("weight")


@pytest.mark.parametrize("dtype", ["int32", "float16", "float32"])
def test_values_are_exchanged_as_they_are(device: Device, dtype: str) -> None:
    if device.target == "cuda":
        pytest.skip("NumPy takes DLPack from host memory only; tests/gpu exchange with torch")
    tensors = kv.TensorMap()
    tensors.set("weight", tensor(device, 2, 3, dtype=dtype))
    assert np.from_dlpack(tensors["weight"]).__array_interface__["data"][0] == tensors["weight"].address


def test_external_weights_are_registered_in_a_map_once(device: Device, tmp_path: Path) -> None:
    save_file({name: np.full((2, 3), value, np.float32) for value, name in enumerate("ba", 1)}, tmp_path / "w.safetensors")
    table: TensorTable = kv.TensorMap()  # the manager knows a table by what it can do, type checkers compare the two
    tensors = kv.TensorMap()
    inputs = [WeightInput(name=name, shape=(2, 3), dtype=kv.dtype("float32")) for name in ("a", "b", "tied")]
    with ExternalWeightManager(device, lambda name, nbytes: device.allocate(nbytes)) as weights:
        weights.load(tmp_path / "w.safetensors", tied={"tied": "b"}, inputs=inputs)
        weights.register(table)
        weights.register(tensors)
        assert tuple(tensors) == tuple(weights.tensors)
        assert tensors["tied"].address == tensors["b"].address
        assert tensors["a"].to_host().tolist() == [[2.0] * 3] * 2
        with pytest.raises(StateError, match="is bound in this table already"):
            weights.register(tensors)
        with pytest.raises(InputError, match="a: bound to .* for good"):
            tensors.rebind("a", tensor(device, 2, 3, dtype="float32"))
    with pytest.raises(StateError, match="a: the tensor's memory has been given back"):
        tensors.get("a")
