"""rotate_kv against NumPy, bit by bit: both kinds of pairs, norms, every pair of types, odd sizes, positions of no row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from numba_kv.cache.kv_launch import RowLaunch
from numba_kv.cache.kv_rotation import HeadNorm, _parts_of, bind_rotation, rotary_rows, rotation_of
from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.kernels.jit import Launch
from tests.helpers.kv_pools import NUMPY, Guarded, converted, numbers, same_bits
from tests.helpers.kv_rotations import normalised, turned, unit_order

NHD, HND = (0, 1, 2, 3, 4), (0, 1, 3, 2, 4)


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def uploaded(device: Device, values: np.ndarray) -> Tensor:
    tensor = device.tensor(values.shape, dtype(values.dtype.name))
    tensor.fill_from(values)
    return tensor


def slots_of(random: np.random.Generator, tokens: int, usable: int) -> np.ndarray:
    slots = np.full(tokens, -1, np.int64)
    real = min(tokens, usable)
    slots[:real] = random.permutation(usable)[:real]
    for token in range(0, tokens, 4):
        slots[token] = random.choice([-1, -7, usable, usable + 3, 2**62, -(2**63)])
    return slots


def check(
    device: Device, kind: str = "bfloat16", pool_kind: str = "bfloat16", *, order=NHD, q_heads=3, heads=2, dim=16, rotary=16,
    interleaved=False, norm: str = "", offset=0.0, weight_kind="float32", page=4, pages=5, tokens=9, skew=0, table_skew=0,
    in_place=True, k_out: str = "", layout: str = "packed", seed=0,
) -> bool:  # fmt: skip
    """Run one call and compare every byte; return whether the kernel takes whole units."""
    random = np.random.default_rng(seed)
    pool = Guarded(device, (2, pages, page, heads, dim), pool_kind, order=order, skew=skew)
    before = pool.values()
    packed = Guarded(device, (tokens, q_heads + 2 * heads + 1, dim), kind, skew=skew)
    packed.fill(numbers(random, packed.tensor.shape, kind))
    given = packed.values()
    parts = {"q": slice(0, q_heads), "k": slice(q_heads, q_heads + heads), "v": slice(q_heads + heads, q_heads + 2 * heads)}
    arrays: dict = {name: packed.tensor[:, part] for name, part in parts.items()}
    outs = {
        name: Guarded(device, (tokens, count, dim), kind, skew=skew)
        for name, count, wanted in (("q_out", q_heads, not in_place), ("k_out", heads, k_out == "apart"))
        if wanted and count
    }
    arrays |= {name: out.tensor for name, out in outs.items()}
    arrays.setdefault("q_out", arrays["q"])
    arrays.setdefault("k_out", arrays["k"] if k_out == "in place" else None)
    if not q_heads:
        arrays["q"] = arrays["q_out"] = None
    rows = 7
    table = Guarded(device, (rows, rotary), "float32", skew=table_skew) if rotary else None
    values = random.uniform(-1, 1, (rows, rotary)).astype(np.float32)
    if table:
        table.fill(values)
    positions = random.integers(0, rows, tokens).astype(np.int32)
    positions[1::5] = random.choice([-1, rows, 2**31 - 1, -(2**31)], len(positions[1::5]))
    weights = {name: numbers(random, (dim,), weight_kind) for name in "qk"}
    eps = 1e-3
    slots = slots_of(random, tokens, (pages - 2) * page)
    scaled = pool_kind == "float8_e4m3" != kind
    factors = random.uniform(0.05, 4, (2, heads)).astype(np.float32) if scaled else None

    arrays |= {"table": table and table.tensor, "positions": uploaded(device, positions)}  # held here: a launch holds nothing
    arrays |= {f"norm.{name}": uploaded(device, weights[name]) if name in norm else None for name in "qk"}
    call = rotation_of(device, pool.tensor.shape, arrays, uploaded(device, slots), interleaved)
    scale = None if factors is None else uploaded(device, factors.reshape(-1))
    bound = bind_rotation(pool.tensor, call, scale, HeadNorm(eps=eps, offset=offset).bits())
    bound.run(tokens, device.stream)

    inside = (positions >= 0) & (positions < rows) if rotary else np.full(tokens, True)
    units = unit_order(dim, rotary, interleaved)
    new = {}
    for name in "qk":
        wide = given[:, parts[name]].astype(np.float32)
        if name in norm:
            wide = normalised(wide, weights[name], eps, offset, units)
        if rotary:
            wide = turned(wide, values[np.where(inside, positions, 0)], interleaved)
        wide[~inside] = 0
        new[name] = wide
    new["v"] = given[:, parts["v"]].astype(np.float32)
    results = {"q": new["q"], "k": new["k"]}
    expected = given.copy()
    if in_place:
        expected[:, parts["q"]] = converted(new["q"], kind)
    if k_out == "in place":
        expected[:, parts["k"]] = converted(new["k"], kind)
    assert same_bits(packed.values(), expected)
    for name, out in outs.items():
        assert same_bits(out.values(), converted(results[name[0]], kind))
    after = before.copy()
    for token, slot in enumerate(slots.tolist()):
        if inside[token] and 0 <= slot < (pages - 2) * page:
            for half, name in enumerate("kv"):
                factor = None if factors is None else factors[half]
                after[half, slot // page, slot % page] = converted(new[name][token], pool_kind, factor)
    assert same_bits(pool.values(), after)
    return bool(bound.kernel.arguments["wide"].value)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("pool_kind", NUMPY)
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_every_pair_of_types(device: Device, kind: str, pool_kind: str, interleaved: bool) -> None:
    check(device, kind, pool_kind, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("order", [NHD, HND], ids=["NHD", "HND"])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (128, 32), (80, 16), (272, 272), (16, 0)])
def test_sizes_of_whole_units(device: Device, dim: int, rotary: int, order: tuple, interleaved: bool) -> None:
    assert check(device, dim=dim, rotary=rotary, order=order, interleaved=interleaved, tokens=6, q_heads=5)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary"), [(2, 2), (7, 4), (24, 24), (40, 18), (33, 0), (100, 34)])
def test_sizes_of_no_whole_units(device: Device, dim: int, rotary: int, interleaved: bool) -> None:
    assert not check(device, "float16", "float8_e4m3", dim=dim, rotary=rotary, interleaved=interleaved, tokens=6)


@pytest.mark.parametrize(("skew", "table_skew"), [(2, 0), (0, 4), (8, 0)])
def test_misaligned_memory_takes_the_narrow_way(device: Device, skew: int, table_skew: int) -> None:
    assert not check(device, skew=skew, table_skew=table_skew)


@pytest.mark.parametrize("norm", ["q", "k", "qk"])
@pytest.mark.parametrize(
    ("dim", "rotary", "interleaved"),
    [(16, 16, False), (64, 64, True), (128, 32, False), (7, 4, True), (24, 24, False), (144, 16, True), (272, 0, False)],
)
def test_norm_before_the_rotation(device: Device, norm: str, dim: int, rotary: int, interleaved: bool) -> None:
    check(device, dim=dim, rotary=rotary, interleaved=interleaved, norm=norm, k_out="apart", tokens=5, q_heads=2)


@pytest.mark.parametrize("weight_kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_weights_of_a_norm(device: Device, weight_kind: str, offset: float) -> None:
    check(device, "float16", "float16", dim=32, rotary=32, norm="qk", weight_kind=weight_kind, offset=offset)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("k_out", ["", "in place", "apart"])
def test_where_results_go(device: Device, in_place: bool, k_out: str) -> None:
    check(device, in_place=in_place, k_out=k_out)
    check(device, "bfloat16", "float8_e4m3", in_place=in_place, k_out=k_out, norm="qk")


@pytest.mark.parametrize("tokens", [0, 1, 2, 17])
@pytest.mark.parametrize("q_heads", [0, 1, 6])
def test_tokens_and_heads(device: Device, tokens: int, q_heads: int) -> None:
    check(device, tokens=tokens, q_heads=q_heads, heads=1, pages=8)


@settings(max_examples=15)
@given(data=st.data())
def test_any_size(device: Device, data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, 40))
    check(
        device,
        *data.draw(st.sampled_from([("bfloat16", "bfloat16"), ("float16", "float8_e4m3")])),
        order=data.draw(st.sampled_from([NHD, HND])),
        q_heads=data.draw(st.integers(0, 3)),
        heads=data.draw(st.integers(1, 3)),
        dim=dim,
        rotary=2 * data.draw(st.integers(0, dim // 2)),
        interleaved=data.draw(st.booleans()),
        tokens=data.draw(st.integers(1, 6)),
        skew=data.draw(st.sampled_from([0, 4, 8])),
        in_place=data.draw(st.booleans()),
        k_out=data.draw(st.sampled_from(["", "in place", "apart"])),
        seed=data.draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("norm", ["", "qk"])
def test_more_heads_than_a_block_has_teams(device: Device, monkeypatch: pytest.MonkeyPatch, norm: str) -> None:
    monkeypatch.setattr("numba_kv.cache.kv_rotation._MOST_THREADS", 64)
    check(device, dim=64, rotary=64, q_heads=40, heads=3, tokens=6, pages=6, norm=norm)


#: Heads of Q and of K, whose lanes of 16 channels fill two blocks; a CPU has as many items as heads.
FILLING = {"cuda": (32, 16), "sim": (4, 2), "cpu": (4, 2)}


def filling(device: Device, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, int], list[int]]:
    """Return heads of which few tokens go the way of few tokens, and a list that gets the blocks of a token of each launch."""
    q_heads, heads = FILLING[device.target]
    used: list[int] = []
    aimed = RowLaunch._aimed

    def watched(self: RowLaunch, tokens: int) -> tuple[Launch, int]:
        found = aimed(self, tokens)
        used.append(found[1] // tokens)
        return found

    monkeypatch.setattr(RowLaunch, "_aimed", watched)
    if device.target == "cpu":
        monkeypatch.setattr("numba_kv.cache.kv_rotation._PARTS", q_heads + 2 * heads)
    assert _parts_of(device, q_heads + 2 * heads, q_heads + 2 * heads)[0] > 1
    return {"q_heads": q_heads, "heads": heads}, used


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("kind", "pool_kind"), [("bfloat16", "bfloat16"), ("float16", "float8_e4m3"), ("float32", "float16")])
def test_few_tokens(device: Device, monkeypatch: pytest.MonkeyPatch, kind: str, pool_kind: str, interleaved: bool) -> None:
    heads, used = filling(device, monkeypatch)
    assert check(device, kind, pool_kind, interleaved=interleaved, **heads)
    assert check(device, kind, pool_kind, interleaved=interleaved, in_place=False, k_out="apart", order=HND, **heads)
    assert len(used) == 2
    assert min(used) > 1


def test_few_tokens_without_a_table(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, used = filling(device, monkeypatch)
    assert check(device, rotary=0, k_out="in place", **heads)
    assert used[0] > 1


@pytest.mark.parametrize("few", [8, 9])
def test_tokens_are_few_up_to_a_number(device: Device, monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr("numba_kv.cache.kv_rotation._FEW_TOKENS", few)
    heads, used = filling(device, monkeypatch)
    assert check(device, tokens=9, **heads)
    assert (used[0] > 1) == (few == 9)


@pytest.mark.parametrize("rotary", [16, 32])
def test_lanes_of_two_units(device: Device, rotary: int) -> None:
    """Teams of two lanes, of which one rotates or both; a CPU has none and goes the other way."""
    q_heads, heads = FILLING[device.target]
    assert check(device, dim=32, rotary=rotary, q_heads=q_heads // 2, heads=heads // 2)


def test_strides_that_are_too_long_are_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba_kv.cache.kv_rotation.NARROW", 64)
    with pytest.raises(ShapeError, match=r"pool: a stride of \d+ bytes from page to page given, less than 64 wanted"):
        check(device)
    monkeypatch.setattr("numba_kv.cache.kv_rotation.NARROW", 8)
    with pytest.raises(ShapeError, match=r"pool: 12 slots given, fewer than 8 wanted"):
        check(device)


def test_an_empty_table_is_refused(device: Device) -> None:
    with pytest.raises(ShapeError, match="a row at least"):
        rotary_rows(device, device.tensor((1, 0, 16), dtype("float32")), 16)


def operands(device: Device, **changes: object) -> dict:
    packed = device.tensor((4, 6, 16), dtype("bfloat16"))
    given = {
        "q": packed[:, :2],
        "k": packed[:, 2:4],
        "v": packed[:, 4:],
        "q_out": packed[:, :2],
        "k_out": None,
        "table": device.tensor((1, 9, 16), dtype("float32")),
        "positions": device.tensor((4,), dtype("int32")),
        "norm.q": None,
        "norm.k": None,
    }
    return {**given, **{name.replace("norm_", "norm."): value for name, value in changes.items()}}


def test_what_cannot_be_written_is_refused(device: Device) -> None:
    pool = device.tensor((2, 4, 2, 2, 16), dtype("bfloat16"))
    slots = uploaded(device, np.arange(4))

    def bound(**changes: object) -> object:
        call = rotation_of(device, pool.shape, operands(device, **changes), slots, False)
        return bind_rotation(pool, call, None, HeadNorm().bits())

    bound()
    other = device.tensor((4, 2, 16), dtype("bfloat16"))
    for changes, message in (
        ({"v": None}, "k, v: one of them is None"),
        ({"q": None}, "q_out: given without q"),
        ({"k": None, "v": None, "k_out": other}, "k_out: given without k"),
        ({"q": None, "q_out": None, "k": None, "v": None}, "q, k, v: none is given"),
        ({"q_out": other[:, :1]}, "q_out: shape"),
        ({"q_out": device.tensor((4, 2, 16), dtype("float32"))}, "q_out: float32"),
        ({"k": device.tensor((4, 1, 16), dtype("bfloat16"))}, r"k: shape \[4, 1, 16\] given"),
        ({"table": device.tensor((9, 16), dtype("float16"))}, "table: "),
        ({"table": device.tensor((2, 9, 16), dtype("float32"))}, "table: .* several row sets"),
        ({"table": device.tensor((9, 18), dtype("float32"))}, "table: rows of 18"),
        ({"table": device.tensor((9, 3), dtype("float32"))}, "table: rows of 3"),
        ({"positions": device.tensor((4,), dtype("int64"))}, "positions: "),
        ({"norm_q": device.tensor((8,), dtype("float32"))}, "norm.q: "),
        ({"norm_q": device.tensor((16,), dtype("float32")), "norm_k": device.tensor((16,), dtype("float16"))}, "one type"),
        ({"v": pool[0, :, 0]}, "v: overlaps the pool"),
        ({"q_out": pool[0, :, 0]}, "q_out: overlaps the pool"),
        ({"k": other, "v": other, "k_out": other}, "k_out: lies in the range of v"),
        ({"k": other, "q": other, "q_out": other}, "q_out: lies in the range of k"),
        ({"q_out": Tensor(other._memory, device, other.dtype, (4, 2, 16), strides=(16, 16, 1))}, "must not overlap itself"),
    ):
        with pytest.raises((InputError, ShapeError), match=message):
            bound(**changes)
    for bad in ({"eps": 0.0}, {"eps": -1.0}, {"eps": np.nan}, {"eps": "x"}, {"offset": np.inf}, {"offset": 1e300}):
        with pytest.raises(InputError, match="norm: "):
            HeadNorm(**bad).bits()  # type: ignore[arg-type]
