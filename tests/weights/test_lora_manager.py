"""Adapters on the device: slots, rows, the view, versions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_kv.device import Device, create_device
from numba_kv.errors import CapacityError, InputError, LoRAError, StateError, WeightError
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.spec import array, scalar
from numba_kv.weights import NO_ADAPTER_HASH, LoRAManager, LoRATarget
from numba_kv.weights.upload import Uploader
from tests.helpers.lora_files import (
    FUSED_TARGETS,
    OUT,
    QKV,
    SIZES,
    K,
    Q,
    V,
    manager,
    padded,
    pairs,
    peft,
    reference,
    save,
    save_peft,
    slot as slot_of,
)


@kernel(block_form=True, slots=array("int64", 2), adapter_ids=array("int32"), out=array("int64", 2), view=scalar())
def read_slots(item, lane, lanes, slots, adapter_ids, out, view):
    slot = np.int64(view)
    if item < adapter_ids.shape[0]:
        slot = np.int64(adapter_ids[item])
    word = np.int64(lane)
    while word < slots.shape[1]:
        out[item, word] = slots[slot, word]
        word += lanes


@pytest.fixture
def device(target: str) -> Iterator[Device]:
    made = create_device(target)
    yield made
    made.stream.close()


@pytest.fixture
def lora(device: Device) -> Iterator[LoRAManager]:
    made = manager(device)
    yield made
    made.close()


def same(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> bool:
    return all(np.array_equal(f, w) for f, w in zip(found, wanted, strict=True))


def ids(lora: LoRAManager) -> list[int]:
    return lora.adapter_ids.to_host().tolist()


def state(lora: LoRAManager) -> tuple[Any, ...]:
    bytes_ = [slot_of(lora, s, name) for s in range(lora.layout.num_slots) for name in SIZES]
    return (dict(lora.adapters), lora.rows, lora.active, ids(lora), lora.tensors.scalings.to_host().tolist()), bytes_


def assert_unchanged(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    assert before[0] == after[0]
    assert all(same(b, a) for b, a in zip(before[1], after[1], strict=True))


def test_a_slot_holds_the_padded_matrices_and_zeros_for_other_targets(lora: LoRAManager) -> None:
    given = pairs(Q, V, rank=3)
    adapter = lora.load("fr", reference(given))
    assert (adapter.name, adapter.version, adapter.slot, adapter.rank, adapter.targets) == ("fr", 1, 1, 3, (Q, V))
    for name in SIZES:
        wanted = padded(given[name], 8) if name in given else (np.zeros((SIZES[name][0], 8)), np.zeros((8, SIZES[name][1])))
        assert same(slot_of(lora, 1, name), wanted)
        assert not any(m.any() for m in slot_of(lora, 0, name)), "slot 0 is the zero adapter"
    assert lora.tensors.scalings.to_host()[1].tolist() == [1, 0, 1, 0]


def test_a_smaller_adapter_after_a_larger_one_leaves_no_tail(lora: LoRAManager) -> None:
    lora.load("big", reference(pairs(Q, K, V, OUT, rank=8)))
    lora.unload("big")
    small = pairs(Q, rank=1)
    assert lora.load("small", reference(small)).slot == 1
    assert same(slot_of(lora, 1, Q), padded(small[Q], 8))
    assert not any(m.any() for name in (K, V, OUT) for m in slot_of(lora, 1, name))


def test_rows_choose_adapters_and_addresses_stay(lora: LoRAManager) -> None:
    addresses = [lora.adapter_ids.address, *(t.address for t in lora.bindings.values()), lora.tensors.a(Q).address]
    fr, de = lora.load("fr", reference(pairs(Q))), lora.load("de", reference(pairs(Q, seed=1)))
    lora.assign({0: "fr", 2: "de", 3: fr})
    assert ids(lora) == [fr.slot, 0, de.slot, fr.slot]
    assert lora.rows == (fr, None, de, fr)
    assert lora.content_hash(0) == fr.content_hash != lora.content_hash(2)
    assert lora.content_hash(1) == NO_ADAPTER_HASH
    lora.assign({0: None, 1: "de"})
    assert ids(lora) == [0, de.slot, de.slot, fr.slot]
    assert addresses == [lora.adapter_ids.address, *(t.address for t in lora.bindings.values()), lora.tensors.a(Q).address]


def test_switch_chooses_for_every_row_and_fills_the_view(lora: LoRAManager) -> None:
    given = pairs(Q, OUT, rank=5)
    fr = lora.load("fr", reference(given))
    lora.load("de", reference(pairs(Q, K, V, OUT, rank=8, seed=3)))
    lora.switch("de")
    lora.switch("fr")
    assert lora.active == fr
    assert ids(lora) == [fr.slot] * 4
    for name in SIZES:
        view = tuple(lora.bindings[f"{name}.lora_{half}.weight"].to_host() for half in "AB")
        assert same(view, slot_of(lora, fr.slot, name))
    assert lora.tensors.view_scalings is not None
    assert lora.tensors.view_scalings.to_host().tolist() == [1, 0, 0, 1]
    lora.switch(None)
    assert lora.active is None
    assert ids(lora) == [0] * 4
    assert not any(tensor.to_host().any() for tensor in lora.bindings.values())


def test_a_captured_graph_reads_other_adapters(lora: LoRAManager, device: Device) -> None:
    """A graph knows addresses alone: what it reads of the view and of the rows' slots follows the choice."""
    words = lora.layout.slot_nbytes // 8
    out = device.tensor((5, words), lora.tensors.words.dtype)
    values = {"slots": lora.tensors.words, "adapter_ids": lora.adapter_ids, "out": out, "view": lora.layout.num_slots}
    read = read_slots.bind(device, values)
    given = {name: pairs(Q, rank=2, seed=seed) for seed, name in enumerate(("fr", "de"))}
    for name, found in given.items():
        lora.load(name, reference(found))
    held = {name: lora.tensors.words[adapter.slot].to_host() for name, adapter in lora.adapters.items()}
    held[""] = np.zeros(words, np.int64)
    lora.assign({})
    read(5, device.stream)  # compiled before it is captured
    graph = device.capture(lambda stream: read(5, stream))

    def seen() -> list[str]:
        graph.launch(device.stream)
        return [next(name for name, bytes_ in held.items() if np.array_equal(row, bytes_)) for row in out.to_host()]

    assert seen() == [""] * 5
    lora.switch("fr")
    assert seen() == ["fr"] * 5
    lora.assign({1: "de", 3: None})
    assert seen() == ["fr", "de", "fr", "", "fr"]
    lora.switch("de")
    assert seen() == ["de"] * 5
    graph.close()


def test_switch_sends_no_byte_and_is_one_launch(lora: LoRAManager, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    lora.load("fr", reference(pairs(Q)))
    sent, launches = device.bytes_to_device, []
    launch = lora._switch
    monkeypatch.setattr(lora, "_switch", lambda *args, **scalars: (launches.append(args), launch(*args, **scalars)))
    lora.switch("fr")
    assert device.bytes_to_device == sent
    assert len(launches) == 1


def test_without_a_view_a_switch_writes_ids_alone(device: Device) -> None:
    lora = manager(device, has_view=False)
    fr = lora.load("fr", reference(pairs(Q)))
    lora.switch("fr")
    assert ids(lora) == [fr.slot] * 4
    assert (dict(lora.bindings), lora.tensors.view_scalings, lora.active) == ({}, None, None)
    lora.assign(dict.fromkeys(range(4)))
    lora.unload("fr")
    lora.close()


def test_the_same_bytes_again_change_nothing(lora: LoRAManager, device: Device) -> None:
    first = lora.load("fr", reference(pairs(Q)))
    sent = device.bytes_to_device
    assert lora.load("fr", reference(pairs(Q))) is first
    assert lora.swap("fr", reference(pairs(Q))) is first
    assert device.bytes_to_device == sent
    other = lora.load("de", reference(pairs(Q)))
    assert other.content_hash == first.content_hash
    assert other.slot != first.slot


def test_other_bytes_under_the_name_are_a_new_version_and_rows_keep_theirs(lora: LoRAManager) -> None:
    old_bytes, new_bytes = pairs(Q, rank=8), pairs(Q, rank=2, seed=5)
    old = lora.load("fr", reference(old_bytes))
    lora.assign({0: "fr", 1: "fr"})
    new = lora.swap("fr", reference(new_bytes))
    assert (new.version, new.slot != old.slot, new.content_hash != old.content_hash) == (2, True, True)
    assert lora.rows[:2] == (old, old)
    assert same(slot_of(lora, old.slot, Q), old_bytes[Q])
    lora.assign({0: "fr", 1: old})
    assert lora.rows[:2] == (new, old)
    lora.assign({1: None})
    with pytest.raises(StateError, match="version 1 of 'fr' is not loaded any more"):
        lora.assign({1: old})
    assert lora.load("de", reference(pairs(K))).slot == old.slot, "its slot is free again"


def test_versions_count_changes_also_over_an_unload(lora: LoRAManager) -> None:
    def load(seed: int) -> int:
        return lora.load("fr", reference(pairs(Q, seed=seed))).version

    assert [load(0), load(0), load(1), load(0)] == [1, 1, 2, 3]
    lora.unload("fr")
    assert load(0) == 3, "the same bytes as before"
    lora.unload("fr")
    assert load(1) == 4


def test_what_is_in_use_cannot_be_unloaded(lora: LoRAManager) -> None:
    lora.load("fr", reference(pairs(Q)))
    lora.assign({2: "fr"})
    with pytest.raises(StateError, match=r"'fr' is in use by rows \[2\], 0 sequences, 0 acquisitions; assign, retire"):
        lora.unload("fr")
    held = lora.acquire("fr")
    lora.assign({2: None})
    with pytest.raises(StateError, match="1 acquisitions"):
        lora.unload("fr")
    lora.switch("fr")
    lora.release(held)
    lora.assign(dict.fromkeys(range(4)))
    with pytest.raises(StateError, match="and the view"):
        lora.unload("fr")
    lora.switch(None)
    lora.unload("fr")
    assert "fr" not in lora
    with pytest.raises(StateError, match="not acquired"):
        lora.release(held)


def test_an_acquired_version_outlives_its_name(lora: LoRAManager) -> None:
    old = lora.acquire(lora.load("fr", reference(pairs(Q))).name)
    lora.load("fr", reference(pairs(Q, seed=1)))
    lora.unload("fr")
    lora.assign({0: old})
    lora.release(old)
    assert lora.rows[0] == old
    lora.assign({0: None})
    assert len(lora._slots._free) == lora.layout.num_slots - 1


def test_capacity(lora: LoRAManager) -> None:
    for seed, name in enumerate(("a", "b")):
        lora.load(name, reference(pairs(Q, seed=seed)))
    lora.assign({0: "a"})
    with pytest.raises(CapacityError, match="2 are loaded, as many as max_adapters allows") as refusal:
        lora.load("c", reference(pairs(Q, seed=2)))
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (1, 0, 1)
    lora.swap("a", reference(pairs(Q, seed=3)))  # row 0 keeps the old bytes: the spare slot is used
    before = state(lora)
    with pytest.raises(CapacityError, match=r"version 1 of 'a' \(1 users\) replaced but still in use"):
        lora.swap("b", reference(pairs(Q, seed=4)))
    assert_unchanged(before, state(lora))
    lora.assign({0: "a"})
    assert lora.swap("b", reference(pairs(Q, seed=4))).version == 2


def test_a_failed_copy_changes_nothing(lora: LoRAManager, monkeypatch: pytest.MonkeyPatch) -> None:
    lora.load("fr", reference(pairs(Q)))
    lora.assign({0: "fr"})
    before = state(lora)[0]

    def fail(*_: object) -> None:
        raise WeightError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Uploader, "upload", fail)
        for name in ("fr", "de"):
            with pytest.raises(WeightError, match="the disk is gone"):
                lora.load(name, reference(pairs(Q, K, seed=9)))
    assert state(lora)[0] == before
    assert lora.load("fr", reference(pairs(Q, K, seed=9))).version == 2


def test_progress_ends_a_load_without_a_trace(lora: LoRAManager) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lora.load("fr", reference(pairs(Q)), progress=stop)
    assert len(lora) == 0
    seen: list[tuple[int, int]] = []
    lora.load("fr", reference(pairs(Q)), progress=lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > 0


def test_a_refused_assignment_changes_nothing(lora: LoRAManager) -> None:
    lora.load("fr", reference(pairs(Q)))
    lora.assign({1: "fr"})
    before = state(lora)
    for rows, said in (
        ({0: "fr", 4: "fr"}, r"row: 4 is not in 0\.\.3"),
        ({0: "fr", -1: None}, "row: -1"),
        ({0: "fr", True: None}, "row: True"),
        ({0: "fr", 2: "es"}, "adapter: 'es' is not loaded; loaded are 'fr'"),
        ({0: "fr", 2: 7}, "adapter: 7 is not loaded"),
    ):
        with pytest.raises(InputError, match=said):
            lora.assign(rows)  # type: ignore[arg-type]
    for call in (lora.switch, lora.unload, lora.acquire, lambda name: lora.swap(name, reference(pairs(Q)))):
        with pytest.raises(InputError, match="'es' is not loaded"):
            call("es")
    assert_unchanged(before, state(lora))


def test_many_assignments_without_waiting(lora: LoRAManager) -> None:
    slots = [lora.load(name, reference(pairs(Q, seed=i))).slot for i, name in enumerate("ab")]
    for step in range(50):
        lora.assign({row: "ab"[(step + row) % 2] for row in range(4)})
    assert ids(lora) == [slots[(49 + row) % 2] for row in range(4)]


def test_types_of_slots(device: Device) -> None:
    for kind in ("float16", "bfloat16", "float32"):
        lora = manager(device, dtype=kind)
        given = pairs(Q, rank=4)
        lora.load("fr", reference(given))
        assert lora.tensors.a(Q).dtype.name == kind
        assert same(slot_of(lora, 1, Q), padded(given[Q], 8))
        lora.close()


def test_scaling_kept_for_the_engine(device: Device, tmp_path: Path) -> None:
    given = pairs(Q, K, rank=4)
    folder = save_peft(tmp_path / "fr", peft(given), lora_alpha=6, alpha_pattern={"k_proj": 2})
    folded, kept = manager(device), manager(device, fold_scaling=False)
    folded.load("fr", folder)
    kept.load("fr", folder)
    assert same(slot_of(folded, 1, Q), padded((given[Q][0], given[Q][1] * 1.5), 8))
    assert folded.tensors.scalings.to_host()[1].tolist() == [1, 1, 0, 0]
    assert same(slot_of(kept, 1, Q), padded(given[Q], 8))
    assert kept.tensors.scalings.to_host()[1].tolist() == [1.5, 0.5, 0, 0]
    folded.close()
    kept.close()


def test_parts_lie_side_by_side_in_a_fused_target(device: Device, tmp_path: Path) -> None:
    given = {**pairs(Q, rank=3), **pairs(V, rank=2, seed=1)}
    lora = manager(device, FUSED_TARGETS)
    assert lora.layout.ranks == (24, 8)
    lora.load("fr", save(tmp_path / "fr.safetensors", reference(given)))
    a, b = slot_of(lora, 1, QKV)
    x = np.random.default_rng(1).integers(-4, 5, (5, 12)).astype(np.float32)
    wanted = np.hstack([x @ given[Q][0] @ given[Q][1], np.zeros((5, 8), np.float32), x @ given[V][0] @ given[V][1]])
    assert np.array_equal(x @ a @ b, wanted)
    lora.close()


def test_a_closed_manager_refuses(lora: LoRAManager) -> None:
    adapter = lora.load("fr", reference(pairs(Q)))
    lora.close()
    lora.close()
    for call in (
        lambda: lora.load("de", reference(pairs(Q))),
        lambda: lora.swap("fr", reference(pairs(Q))),
        lambda: lora.unload("fr"),
        lambda: lora.acquire("fr"),
        lambda: lora.release(adapter),
        lambda: lora.assign({0: "fr"}),
        lambda: lora.switch(None),
    ):
        with pytest.raises(StateError, match="LoRAManager is closed"):
            call()
    assert "closed" in repr(lora)
    assert not lora.adapters


def test_a_load_does_not_outlive_a_close(lora: LoRAManager) -> None:
    lora.load("fr", reference(pairs(Q)))
    with pytest.raises(StateError, match="LoRAManager is closed"):
        lora.load("de", reference(pairs(Q, seed=1)), progress=lambda done, total: lora.close())
    assert not lora.adapters


def test_progress_has_to_be_callable(lora: LoRAManager, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="progress: 5"):
        lora.load("fr", tmp_path / "nowhere.safetensors", progress=5)  # type: ignore[arg-type]


def test_rows_are_assigned_while_an_adapter_loads(lora: LoRAManager) -> None:
    lora.load("fr", reference(pairs(Q)))
    reached, go_on = threading.Event(), threading.Event()

    def wait(done: int, total: int) -> None:
        reached.set()
        assert go_on.wait(30)

    loader = threading.Thread(target=lora.load, args=("de", reference(pairs(Q, seed=1))), kwargs={"progress": wait})
    loader.start()
    assert reached.wait(30)
    lora.assign({0: "fr"})
    lora.switch("fr")
    assert "de" not in lora
    go_on.set()
    loader.join()
    assert lora.adapters["de"].slot == 2
    assert lora.rows[0] is not None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_rank": 0}, "max_rank: 0"),
        ({"max_adapters": True}, "max_adapters: True"),
        ({"max_batch_size": 1.5}, "max_batch_size: 1.5"),
        ({"dtype": "int8"}, "dtype: int8 is not one of float16"),
        ({"targets": ()}, "targets: at least one"),
        ({"targets": (LoRATarget(name=Q, k=1, n=1), LoRATarget(name=Q, k=2, n=2))}, "there twice"),
    ],
)
def test_wrong_limits(device: Device, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        manager(device, **wrong)


def test_wrong_names_and_targets(lora: LoRAManager) -> None:
    for name in ("", 3, None):
        with pytest.raises(InputError, match="is not a name"):
            lora.load(name, reference(pairs(Q)))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'x' is not one of the engine's 4 targets"):
        lora.tensors.a("x")
    with pytest.raises(InputError, match="layout: 'x' is not one of auto"):
        lora.load("fr", reference(pairs(Q)), layout="x")


def test_the_plan_is_what_is_taken(device: Device) -> None:
    taken: dict[str, int] = {}

    def take(name: str, nbytes: int) -> Any:
        taken[name] = nbytes
        return device.allocate(nbytes)

    before = device.memory.current_bytes
    lora = LoRAManager(device, take, FUSED_TARGETS, max_rank=4, max_adapters=3, dtype="float16", max_batch_size=7)
    assert taken == {"lora.slots": lora.layout.slots_nbytes, "lora.adapter_ids": lora.layout.ids_nbytes}
    assert lora.layout.slots_nbytes % 256 == lora.layout.slot_nbytes % 256 == 0
    assert device.memory.current_bytes - before == lora.layout.nbytes
    lora.close()


def test_a_load_of_a_wrong_adapter_leaves_the_device_alone(lora: LoRAManager, device: Device) -> None:
    lora.load("fr", reference(pairs(Q)))
    lora.switch("fr")
    before, sent, held = state(lora), device.bytes_to_device, device.memory.current_bytes
    with pytest.raises(LoRAError, match="at most 8 is allowed"):
        lora.load("fr", reference(pairs(Q, rank=9)))
    assert (device.bytes_to_device, device.memory.current_bytes) == (sent, held)
    assert_unchanged(before, state(lora))


@pytest.mark.gpu
def test_adapters_do_not_change_inside_a_capture(lora: LoRAManager, device: Device) -> None:
    from cuda.bindings import driver

    lora.load("fr", reference(pairs(Q)))
    stream = device.stream.driver_stream  # type: ignore[attr-defined]
    driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    try:
        for call in (lambda: lora.switch("fr"), lambda: lora.assign({0: "fr"}), lambda: lora.load("de", reference(pairs(K)))):
            with pytest.raises(StateError, match="inside a capture"):
                call()
    finally:
        _, graph = driver.cuStreamEndCapture(stream)
    driver.cuGraphDestroy(graph)
    lora.switch("fr")
    assert ids(lora) == [1] * 4
