"""Kernels of a speculative round against loops: what is kept of a row, how far a draft is behind, where nodes of a tree are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_kv as kv
from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.kernels import layout
from numba_kv.kernels.round_commit import commit_rounds, resolve_rounds
from numba_kv.kernels.round_steps import count_behind, place_nodes

EXAMPLES = 8 if kv.target() == "sim" else 60
ROWS, NODES, WIDE = 3, 5, 8
INTS = st.integers(-2, NODES + 1)


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def uploaded(device: Device, values: object) -> Tensor:
    array = np.array(values, np.int32)
    if not array.size:  # no columns
        return Tensor(device.tensor((1,), dtype("int32"))._memory, device, dtype("int32"), array.shape)
    tensor = device.tensor(array.shape, dtype("int32"))
    tensor.fill_from(array)
    return tensor


def decided(last: int, count: int, nodes: list[int] | None, parents: list[int] | None) -> tuple[int, list[int]]:
    """Return why a row is refused, and the nodes that it keeps."""
    if last == 0:
        return 0, []
    if not 0 <= count <= (last if nodes is None else len(nodes)):
        return int(kv.Status.BAD_COUNT), []
    if nodes is None:
        return 0, list(range(count))
    path = [node for node in nodes[:count] if node != -1]
    links = list(zip([-1, *path], path, strict=False))
    if any(not before < node < last for before, node in links):
        return int(kv.Status.BAD_PATH), []
    if parents is not None and any(node >= len(parents) or parents[node] != before for before, node in links):
        return int(kv.Status.BAD_PATH), []
    return 0, path


@settings(max_examples=EXAMPLES)
@given(
    data=st.data(),
    form=st.sampled_from(["counts", "paths", "tree"]),
    keeps=st.booleans(),
    has_draft=st.booleans(),
)
def test_verdicts(device: Device, data: st.DataObject, form: str, keeps: bool, has_draft: bool) -> None:
    """Without windows and floors: both kernels decide alike, and what is refused or not in use stays as it was."""
    live = data.draw(st.lists(st.integers(0, 1), min_size=ROWS, max_size=ROWS))
    last = data.draw(st.lists(st.just(NODES) | st.integers(0, NODES), min_size=ROWS, max_size=ROWS))
    before = data.draw(st.lists(st.integers(0, 9), min_size=ROWS, max_size=ROWS))
    drafted = data.draw(st.lists(st.integers(0, 16), min_size=ROWS, max_size=ROWS))
    counts = [data.draw(st.integers(1, 4) | st.sampled_from([-1, n, n + 1])) for n in last]
    rows_of = st.lists(st.lists(INTS, min_size=4, max_size=4), min_size=ROWS, max_size=ROWS)
    rising = st.lists(st.lists(st.integers(0, NODES - 1), max_size=4).map(sorted), min_size=ROWS, max_size=ROWS)
    nodes = data.draw(rows_of | rising.map(lambda rows: [[*row, *[-1] * 4][:4] for row in rows]))
    parents = [[-1, 0, 0, 1, 3]] * ROWS if form == "tree" else [[]] * ROWS
    given_nodes = nodes if form != "counts" else [[]] * ROWS
    lengths = [b + n for b, n in zip(before, last, strict=True)]
    group = np.zeros((1, layout.GROUP_COLUMNS), np.int64)
    groups = device.tensor(group.shape, dtype("int64"))
    groups.fill_from(group)
    names = ("kept", "slots", "status", "floors", "seq_lens", "context_lens", "draft_seq_lens", "draft_context_lens")
    arrays = {name: uploaded(device, [0] * ROWS) for name in names}
    arrays |= {"accepted": uploaded(device, counts), "live": uploaded(device, live), "state_index": uploaded(device, [4, 5, 6])}
    arrays |= {"nodes": uploaded(device, given_nodes), "parents": uploaded(device, parents)}
    arrays |= {"path": uploaded(device, np.full((ROWS, len(given_nodes[0])), 9)), "draft_floors": arrays["floors"]}
    for name, values in (("lengths", lengths), ("appended", last), ("draft_lengths", drafted), ("draft_appended", [1] * ROWS)):
        arrays[name] = uploaded(device, [values])
    for name in ("high_water", "draft_high_water", "mapped_begin", "draft_mapped_begin"):
        arrays[name] = uploaded(device, [[20] * ROWS])
    for name in ("page_tables", "block_tables", "draft_page_tables", "draft_block_tables"):
        arrays[name] = uploaded(device, [0] * WIDE)
    values = {**arrays, "groups": groups, "draft_groups": groups, "keeps": int(keeps), "has_draft": int(has_draft)}
    for kernel in (resolve_rounds, commit_rounds):
        kernel.bind(device, {name: values[name] for name in kernel.arguments}, threads=32)(ROWS, device.stream)
    found = {name: tensor.to_host() for name, tensor in arrays.items()}
    for row in range(ROWS):
        tree = parents[row] if form == "tree" else None
        status, path = decided(last[row], counts[row], None if form == "counts" else nodes[row], tree)
        taken = bool(live[row]) and status == 0
        is_part = taken and last[row] > 0
        assert found["status"][row] == (status if live[row] else 0)
        assert found["kept"][row] == (len(path) if is_part else 0)
        assert found["slots"][row] == (4 + row if is_part else -1)
        if form != "counts":
            assert found["path"][row].tolist() == [*(path if is_part else []), *[-1] * 4][:4]
        length = before[row] + len(path) if taken else lengths[row]
        draft = min(drafted[row], before[row] + (len(path) if keeps else 0)) if taken and has_draft else drafted[row]
        assert (found["lengths"][0, row], found["draft_lengths"][0, row]) == (length, draft)
        assert found["appended"][0, row] == (0 if taken else last[row])
        assert found["seq_lens"][row] == (length if taken else 0)
        assert found["draft_appended"][0, row] == (0 if taken and has_draft else 1)


@settings(max_examples=EXAMPLES)
@given(data=st.data(), ahead=st.integers(0, 1))
def test_a_draft_is_behind_by_so_many_tokens(device: Device, data: st.DataObject, ahead: int) -> None:
    base, draft, live = (data.draw(st.lists(st.integers(0, n), min_size=ROWS, max_size=ROWS)) for n in (9, 9, 1))
    counts = uploaded(device, [7] * ROWS)
    arrays = {"counts": counts, "lengths": uploaded(device, [base]), "draft_lengths": uploaded(device, [draft])}
    count_behind.bind(device, {**arrays, "live": uploaded(device, live), "ahead": ahead})(ROWS, device.stream)
    assert counts.to_host().tolist() == [max(0, b + ahead - d) * use for b, d, use in zip(base, draft, live, strict=True)]


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_nodes_stand_as_deep_as_they_are(device: Device, data: st.DataObject) -> None:
    """A parent that does not come before its child ends the way up: no tree makes the kernel run for ever."""
    parents = data.draw(st.lists(st.lists(INTS, min_size=NODES, max_size=NODES), min_size=ROWS, max_size=ROWS))
    appended = data.draw(st.lists(st.integers(0, NODES), min_size=ROWS, max_size=ROWS))
    starts, first = np.cumsum([0, *appended]).tolist(), [3, 0, 8]
    positions = uploaded(device, [-7] * (ROWS * NODES))
    arrays = {"parents": uploaded(device, parents), "positions": positions, "cu_seqlens_q": uploaded(device, starts)}
    arrays |= {"context_lens": uploaded(device, first), "appended": uploaded(device, [appended])}
    place_nodes.bind(device, arrays)(ROWS * NODES, device.stream)
    expected = [-7] * (ROWS * NODES)
    for row in range(ROWS):
        for node in range(appended[row]):
            depth, at = 0, node
            while 0 <= parents[row][at] < at:
                depth, at = depth + 1, parents[row][at]
            expected[starts[row] + node] = first[row] + depth
    assert positions.to_host().tolist() == expected
