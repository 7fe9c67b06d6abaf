"""FlashAttention's arguments, given to NumPy kernels with its signatures, against float64 attention over all that was written.

Each row is attended with NaN in every page that is not its own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.adapters.flash_attention import FlashAttention, is_installed
from numba_kv.geometry import Window
from tests.helpers.deployments import pair
from tests.helpers.models import chunked, tiny_config
from tests.helpers.paged_kernels import fa2_varlen, fa2_with_kvcache, fa3_with_kvcache, fa4_varlen, torch_varlen, vllm_varlen
from tests.helpers.written_batch import WrittenBatch, written

RAGGED: dict[str, Callable[..., np.ndarray]] = {
    "fa2": fa2_varlen,
    "fa3": fa3_with_kvcache,
    "fa4": fa4_varlen,
    "torch": torch_varlen,
    "vllm_fa2": vllm_varlen,
    "vllm_fa3": vllm_varlen,
}
EVEN = {"fa2": fa2_with_kvcache, "fa3": fa3_with_kvcache}
#: What K and V are called.
POOLS = (("k_cache", "k", "key"), ("v_cache", "v", "value"))
#: W around P, and chunks of whole pages.
SHAPES = [("fa3", 4, w) for w in (3, 4, 5)] + [
    ("fa2", 256, 256),
    ("fa2", 256, 257),
    ("fa4", 16, 17),
    ("torch", 256, 255),
    ("vllm_fa2", 16, 15),
    ("vllm_fa3", 4, 6),
]


def as_it_is(value: Any) -> Any:
    return value


def model_of(page: int, *windows: Window | int | None, **limits: Any) -> kv.LLMEngineConfig:
    rows = {"max_kv_cache_capacity": 128 if page < 256 else 1280, "max_batch_tokens": 1024, "max_batch_size": 4}
    kinds = {"kv_cache_dtype": "float16", "max_step_tokens": 3, "heads": (2, 8)}
    return tiny_config(*windows, page_tokens=page, **{**rows, **kinds, **limits})


def prompts(page: int) -> list[int]:
    return [5, 40, 1] if page < 256 else [600, 300, 1]


def compare(model: WrittenBatch, layer: int, q: np.ndarray, arguments: dict[str, Any], kernel: Any, even: bool = False) -> None:
    """Run a kernel once a row, over pages of that row alone."""
    expected = model.expected(layer, q)
    k_name, v_name = next(pair for pair in (("k_cache", "v_cache"), ("k", "v"), ("key", "value")) if pair[0] in arguments)
    for sequence in model.counts:
        given = arguments | {name: model.poisoned(layer, half, sequence.row) for half, name in enumerate((k_name, v_name))}
        rows = len(model.batch.sequences)
        out = kernel(q.reshape(rows, -1, *q.shape[1:]) if even else q, **given).reshape(q.shape)
        tokens = model.tokens_of(sequence)
        assert np.allclose(out[tokens], expected[tokens], rtol=0, atol=1e-9), (layer, sequence)


def is_refused(model: WrittenBatch, layer: int, view: kv.StepView, has_chunks: bool) -> str | None:
    """Return what a refusal of a layer in a step says; None: it is attended."""
    window = model.caches.storage(layer).window
    if window.is_full:
        return None
    if view.is_long:
        return r"appended more than max_step_tokens \(3\).*view.carry_slots\[\d\] \(PagedAttention.attend_long does\)"
    if window.kind == "chunked" and not has_chunks and view.max_query_tokens > 1:
        return "a table that begins with the chunk replaces it in steps of one token a row"
    return None


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("version", "page", "window"), SHAPES)
def test_every_row_of_every_step(version: str, page: int, window: int, compact: bool) -> None:
    """Full, sliding and chunked layers, ragged steps, holes and empty rows, rewinds; one layer borrows K and V."""
    config = model_of(page, None, window, chunked(2 * page))
    with written(config) as model:
        flash = FlashAttention(model.batch, version, compact=compact, arrays=as_it_is)
        evens = 0
        for view in model.life(prompts(page), 3, 2 + 18 // 3):
            step = flash.step(view)
            for layer in range(3):
                message = is_refused(model, layer, view, version == "fa3")
                if message:
                    with pytest.raises(kv.InputError, match=message):
                        step.ragged(layer)
                    continue
                q = model.queries(layer, view)
                compare(model, layer, q, step.ragged(layer), RAGGED[version])
                if version in EVEN and view.num_tokens == view.num_rows * view.max_query_tokens:
                    compare(model, layer, q, step.even(layer), EVEN[version], even=True)
                    evens += 1
        assert evens >= 6 or version not in EVEN


@pytest.mark.parametrize("compact", [False, True])
def test_lengths_that_only_the_device_knows(compact: bool) -> None:
    """Drafts of three tokens, of which the device keeps some: the host has bounds, the kernels read the lengths."""
    with written(model_of(4, None, 6)) as model:
        flash, random = FlashAttention(model.batch, "vllm_fa3", compact=compact, arrays=as_it_is), np.random.default_rng(1)
        rows = model.batch.update(admit=[9, 3])
        model.step({s: s.pending_tokens for s in rows})
        view = model.step(dict.fromkeys(rows, 3))
        for _ in range(8):
            view = model.step(dict.fromkeys(rows, 3), {s: int(random.integers(0, 4)) for s in rows})
            assert not view.kv_len_is_exact
            for layer in (0, 1):
                compare(model, layer, model.queries(layer, view), flash.step(view).ragged(layer), vllm_varlen)


def test_the_arguments_by_name() -> None:
    with written(model_of(256, None, 257)) as model:
        (a,) = model.batch.update(admit=[300])
        model.step({a: 300})
        view = model.step({a: 1})
        flash = FlashAttention(model.batch, "fa2", arrays=as_it_is)
        assert not flash.needs_host_lengths
        full, sliding = (flash.step(view).ragged(layer) for layer in (0, 1))
        names = {
            "k",
            "v",
            "block_table",
            "cu_seqlens_q",
            "cu_seqlens_k",
            "max_seqlen_q",
            "max_seqlen_k",
            "causal",
            "window_size",
        }
        assert set(full) == set(sliding) == names
        assert (full["window_size"], sliding["window_size"]) == ((-1, -1), (256, 0))
        assert (full["max_seqlen_q"], full["max_seqlen_k"]) == (1, 301)
        assert full["k"].address == model.caches.k(0).address
        assert full["v"].address == model.caches.v(0).address
        assert sliding["block_table"].address == view.block_tables[1].address
        assert sliding["block_table"].shape[0] == view.num_rows == 1
        even = flash.step(view).even(1)
        assert set(even) == {"k_cache", "v_cache", "block_table", "cache_seqlens", "causal", "window_size"}
        fa4 = FlashAttention(model.batch, "fa4", arrays=as_it_is).step(view)
        assert (fa4.ragged(0)["window_size"], fa4.ragged(1)["window_size"]) == ((None, None), (256, 0))
        vllm = FlashAttention(model.batch, "vllm_fa3", arrays=as_it_is).step(view).ragged(0)
        assert (vllm["fa_version"], vllm["seqused_k"].to_host().tolist()) == (3, [301])


def test_torch_s_arrays_are_the_default_and_stay_right(target: str) -> None:
    """They are made once: tables and lengths of later steps are seen through them."""
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    with written(model_of(4, None, 6, kv_cache_dtype="float8_e4m3"), (1.0, 0.5)) as model:
        flash = FlashAttention(model.batch, "fa3", io=model.io)
        for view in model.life([3, 3, 1], 3, 2):
            found = flash.step(view).ragged(1)
            assert (found["k_cache"].dtype, found["k_cache"].data_ptr()) == (torch.float8_e4m3fn, model.caches.k(1).address)
            assert found["page_table"].cpu().tolist() == view.block_tables[1].to_host()[: view.num_rows].tolist()
            assert found["cache_seqlens"].cpu().tolist() == view.seq_lens.to_host()[: view.num_rows].tolist()
            assert found["v_descale"].cpu().tolist() == [[0.5, 0.5]] * view.num_rows


@pytest.mark.parametrize("version", list(RAGGED))
def test_pages_of_the_other_layout_are_given_by_token(version: str) -> None:
    """Every version takes any strides, if the last is 1 and the others are whole 16 bytes."""
    page = 16 if version[-1] in "34" or version == "vllm_fa2" else 256
    with written(model_of(page, None, 17, kv_layout=("HND", "NHD"))) as model:
        flash = FlashAttention(model.batch, version, arrays=as_it_is)
        a, b = model.batch.update(admit=[3, 3])
        view = model.step({a: 3, b: 3})
        step = flash.step(view)
        for layer in (0, 1):
            pool = model.caches.by_token(layer)
            kinds = [step.ragged(layer)] + ([step.even(layer)] if version in EVEN else [])
            for arguments in kinds:
                k, v = (next(arguments[name] for name in names if name in arguments) for names in POOLS)
                assert (k.address, v.address) == (pool[0].address, pool[1].address)
                assert k.shape == v.shape == (model.caches.storage(layer).num_pages, page, 2, 8)
                assert k.strides == v.strides
                assert k.strides[-1] == 1
                assert all(stride % 8 == 0 for stride in k.strides[:-1])
                assert np.array_equal(v.to_host(), pool[1].to_host())
            compare(model, layer, model.queries(layer, view), kinds[0], RAGGED[version])


def test_a_captured_step_has_all_rows_and_bounds_for_all_its_steps() -> None:
    with written(model_of(256, None, 257)) as model:
        a, b = model.batch.update(admit=[300, 20])
        model.step({a: 300, b: 20})
        view = model.step({a: 1, b: 1})
        flash = FlashAttention(model.batch, "fa2", arrays=as_it_is)
        step = flash.step(view, captured=True, stream=model.resources.stream)
        found = step.ragged(1)
        assert found["block_table"].shape[0] == 4
        assert found["cu_seqlens_q"].shape == (5,)
        assert found["max_seqlen_k"] == 1280
        assert found["max_seqlen_q"] == 2  # 1 would take query r for row r, and rows may empty
        with pytest.raises(kv.InputError, match="a captured step; rows of 1 tokens each"):
            step.even(1)
        q = model.queries(0, view)
        compare(model, 0, q, step.ragged(0), fa2_varlen)


def test_layers_that_borrow_read_their_donor_s_pages_and_forms_are_made_once_a_step() -> None:
    with written(model_of(4, 6, chunked(8), 6, donors={2: 0})) as model:
        flash = FlashAttention(model.batch, "vllm_fa3", compact=True, arrays=as_it_is)
        (a,) = model.batch.update(admit=[3])
        model.step({a: 3})
        step = flash.step(model.step({a: 1}))
        own, borrowed = step.ragged(0), step.ragged(2)
        assert own["k"] is borrowed["k"] or own["k"].address == borrowed["k"].address
        assert own["block_table"] is borrowed["block_table"]
        assert own["block_table"].address == model.batch.derived.compact(1).window_tables.address


def test_a_draft_model_has_pools_and_tables_of_its_own() -> None:
    base, draft = model_of(4, None, 6), model_of(8, None, max_kv_cache_capacity=131)
    with kv.SharedResources.create_for_spec_decode(pair(base=base, draft=draft)) as resources:
        for index, layers in ((0, 2), (1, 1)):
            batch, caches = kv.Batch(resources, index=index), resources.cache_managers[index]
            (row,) = batch.update(admit=[3])
            step = FlashAttention(batch, "fa3", arrays=as_it_is).step(batch.step({row: 3}))
            for layer in range(layers):
                assert step.ragged(layer)["k_cache"].address == caches.k(layer).address
            assert step.ragged(0)["page_table"].address == caches.step_buffers.block_tables[0].address


@pytest.mark.parametrize("scales", [(0.5, 2.0), (np.array([0.5, 2.0], np.float32), np.array([1.0, 0.25], np.float32))])
@pytest.mark.parametrize("version", ["fa3", "vllm_fa3"])
def test_float8_comes_with_its_scales(version: str, scales: tuple[Any, Any]) -> None:
    config = model_of(4, None, 6, kv_cache_dtype="float8_e4m3")
    with written(config, scales) as model:
        flash = FlashAttention(model.batch, version, io=model.io, arrays=as_it_is)
        for view in model.life([3, 3, 1], 3, 2):
            for layer in (0, 1):
                compare(model, layer, model.queries(layer, view), flash.step(view).ragged(layer), RAGGED[version])
        with pytest.raises(kv.StateError, match="whose scales are in KVIO: give FlashAttention its io="):
            FlashAttention(model.batch, version, arrays=as_it_is).step(view).ragged(0)


@pytest.mark.parametrize(
    ("version", "page", "limits", "message"),
    [
        (
            "fa2",
            16,
            {},
            "page_tokens: FlashAttention 2 reads pages of a multiple of 256 tokens, these have 16; .*=256",
        ),
        ("vllm_fa2", 4, {}, "page_tokens: vLLM's FlashAttention 2 reads pages of a multiple of 16 tokens, these have 4"),
        ("fa3", 4, {"kv_cache_dtype": "float32"}, "kv_cache_dtype: FlashAttention 3 reads .*; layer 0 is stored as float32"),
        ("fa4", 4, {"kv_cache_dtype": "float8_e4m3"}, "kv_cache_dtype: FlashAttention 4 reads float16, bfloat16; layer 0"),
        (
            "fa3",
            4,
            {"heads": (1, 12)},
            "head_dim: .* 3 reads heads of a multiple of 8 up to 256 channels; layer 0 has 12",
        ),
        ("fa3", 4, {"heads": (1, 264)}, "head_dim: .* has 264"),
    ],
)
def test_what_a_version_cannot_read_is_named(version: str, page: int, limits: dict[str, Any], message: str) -> None:
    with kv.SharedResources.create_for_llm(model_of(page, None, **limits)) as resources, kv.Batch(resources) as batch:
        (a,) = batch.update(admit=[2])
        step = FlashAttention(batch, version, arrays=as_it_is).step(batch.step({a: 2}))
        for _ in range(2):
            with pytest.raises(kv.ConfigError, match=message):
                step.ragged(0)


def test_chunks_that_do_not_begin_with_a_page_need_a_kernel_that_knows_them() -> None:
    with written(model_of(4, chunked(6))) as model:
        (a,) = model.batch.update(admit=[2])
        model.step({a: 2})
        view = model.step({a: 1})
        q = model.queries(0, view)
        fa3 = FlashAttention(model.batch, "fa3", arrays=as_it_is).step(view).ragged(0)
        assert fa3["attention_chunk"] == 6
        compare(model, 0, q, fa3, fa3_with_kvcache)
        with pytest.raises(kv.InputError, match="do not begin with a page of 4 tokens; take a page_tokens that divides 6"):
            FlashAttention(model.batch, "fa4", arrays=as_it_is).step(view).ragged(0)


def test_bad_arguments(target: str) -> None:
    with written(model_of(4, None, 6)) as model, kv.SharedResources.create_for_llm(model_of(4, None)) as other:
        (a,) = model.batch.update(admit=[5])
        view = model.step({a: 3})
        flash = FlashAttention(model.batch, "fa3", arrays=as_it_is)
        foreign = kv.Batch(other)
        (b,) = foreign.update(admit=[3])
        for wrong in (None, foreign.step({b: 3})):
            with pytest.raises(kv.InputError, match="view: .* is not a step of this batch"):
                flash.step(wrong)
        for version in ("fa5", None, ["fa2"]):
            with pytest.raises(kv.InputError, match="version: .* is not one of 'fa2', "):
                FlashAttention(model.batch, version)
        with pytest.raises(kv.InputError, match="batch: SharedResources given"):
            FlashAttention(other, "fa3")
        with pytest.raises(kv.InputError, match="io: .* is not a KVIO of this batch's caches"):
            FlashAttention(foreign, "fa3", io=model.io)
        with pytest.raises(kv.InputError, match="layer: 2 "):
            flash.step(view).ragged(2)
        with pytest.raises(kv.InputError, match="even: FlashAttention 4 has no function for rows of equal tokens"):
            FlashAttention(model.batch, "fa4", arrays=as_it_is).step(view).even(0)
        model.step({a: 2})
        (c,) = model.batch.update(admit=[4])
        with pytest.raises(kv.InputError, match=r"3 tokens in 2 rows; rows of 3 tokens each .*compact\(\)"):
            flash.step(model.step({c: 3})).even(0)
        counts = model.resources.device.tensor((4,), kv.dtype("int32"))
        view = model.batch.step({a: 1, c: 1}, counts=counts)
        with pytest.raises(kv.InputError, match=r"fewer tokens than they have queries \(counts=\).*PagedAttention attends"):
            flash.step(view)
        model.batch.close()
        for request in (lambda: flash.step(view), lambda: FlashAttention(model.batch, "fa3")):
            with pytest.raises(kv.StateError, match="closed"):
                request()


def test_sums_of_lengths_that_pass_32_bits_are_refused() -> None:
    limits = {"max_batch_size": 2048, "max_kv_cache_capacity": 1 << 20, "max_batch_tokens": 2048, "num_kv_pages": 4096}
    config = tiny_config(None, page_tokens=256, **limits)
    with kv.SharedResources.create_for_llm(config) as resources, kv.Batch(resources) as batch:
        with pytest.raises(kv.ConfigError, match="adds up the lengths of all rows in 32 bits"):
            FlashAttention(batch, "fa2")
        FlashAttention(batch, "vllm_fa2")


@pytest.mark.parametrize("version", list(RAGGED))
def test_a_library_that_is_not_installed_is_named(version: str) -> None:
    with written(model_of(256, None, heads=(1, 64))) as model:
        flash = FlashAttention(model.batch, version, arrays=as_it_is)
        packages = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn", "torch": "torch"}
        package = packages.get(version, "vllm")
        if importlib.util.find_spec(package):
            pytest.skip(f"{package} is installed")
        with pytest.raises(kv.InteropError, match=f"no {package}.* is installed here"):
            flash.function()
        (a,) = model.batch.update(admit=[5])
        view = model.step({a: 5})
        with pytest.raises(kv.InteropError, match="is installed here"):
            flash.step(view).attend(0, model.queries(0, view))


def test_a_library_from_before_its_paged_attention_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(flash_attn_varlen_func=lambda q, k, v: None, flash_attn_with_kvcache=lambda q, block_table: None)
    monkeypatch.setitem(sys.modules, "flash_attn", old)
    with written(model_of(256, None)) as model:
        flash = FlashAttention(model.batch, "fa2", arrays=as_it_is)
        with pytest.raises(kv.InteropError, match="flash_attn.flash_attn_varlen_func takes no block_table here"):
            flash.function()
        assert flash.function(even=True) is old.flash_attn_with_kvcache
        assert not is_installed("fa2")


@pytest.mark.gpu
def test_arguments_inside_a_graph_of_torch_stay_right() -> None:
    """What a captured kernel reads through them in replay after replay: the table and lengths of that step."""
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    stream, steps = torch.cuda.Stream(), 30
    with (
        torch.cuda.stream(stream),
        kv.SharedResources.create_for_llm(model_of(4, None, 6), target="cuda", stream=stream) as res,
        kv.Batch(res) as batch,
    ):
        a, b = batch.update(admit=[40, 9])
        batch.step({a: 40, b: 9})
        view = batch.step(1)
        flash = FlashAttention(batch, "vllm_fa2", compact=True)
        with pytest.raises(kv.ConfigError, match="page_tokens"):
            flash.step(view).ragged(0)
        flash = FlashAttention(batch, "vllm_fa3", compact=True)
        before = flash.step(view, captured=True).ragged(1)  # derived forms are there before the capture
        tables = torch.zeros((steps, *before["block_table"].shape), dtype=torch.int32, device="cuda")
        lengths = torch.zeros((steps, 4), dtype=torch.int32, device="cuda")
        count = torch.zeros(1, dtype=torch.int64, device="cuda")
        tables.index_copy_(0, count, before["block_table"][None])
        lengths.index_copy_(0, count, before["seqused_k"][None])
        count.add_(1).zero_()
        graph = torch.cuda.CUDAGraph()
        batch.reserve(steps)
        with torch.cuda.graph(graph, stream=stream):
            batch.enqueue_step(stream)
            found = flash.step(view, captured=True, stream=stream).ragged(1)
            tables.index_copy_(0, count, found["block_table"][None])
            lengths.index_copy_(0, count, found["seqused_k"][None])
            count.add_(1)
        for _ in range(steps):
            graph.replay()
        batch.advanced(steps)
        blocks, group = batch._buffers.block_tables[1].to_host(), batch.plan.groups[1]
        for step in range(steps):
            for row, length in ((0, 42 + step), (1, 11 + step)):
                begin, end = group.window.lowest_key(length - 1) // 4, -(-length // 4)
                assert lengths[step, row].item() == length - 4 * begin
                assert tables[step, row, : end - begin].tolist() == blocks[row, begin:end].tolist()
            assert lengths[step, 2:].tolist() == [0, 0]
        del graph


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("version", "page"), [("fa2", 256), ("fa3", 16), ("fa4", 16), ("torch", 256), ("vllm_fa2", 16), ("vllm_fa3", 16)]
)
def test_the_library_itself(version: str, page: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    config = model_of(page, None, page + 1, chunked(2 * page), heads=(2, 64), kv_cache_dtype="bfloat16")
    with written(config) as model:
        flash = FlashAttention(model.batch, version)
        try:
            flash.function()
        except kv.InteropError as error:
            pytest.skip(str(error))
        for view in model.life(prompts(page), 3, 4):
            for layer in range(3):
                if is_refused(model, layer, view, version == "fa3"):
                    continue
                q = model.queries(layer, view)
                with torch.cuda.stream(torch.cuda.ExternalStream(model.resources.stream.handle)):
                    given = torch.from_numpy(q).to("cuda", torch.bfloat16)
                    out = flash.step(view).attend(layer, given)
                    out = out[0] if isinstance(out, tuple) else out
                    found, rounded = out.double().cpu().numpy(), given.double().cpu().numpy()
                assert np.abs(found - model.expected(layer, rounded)).max() < 0.05


def test_a_kvio_is_known_by_its_caches() -> None:
    class Borrowed(kv.KVIO):
        """Another one's caches, as its public face says."""

        def __init__(self, caches: Any) -> None:
            self.given = caches

        @property
        def caches(self) -> Any:
            return self.given

    with written(model_of(4, None)) as model, written(model_of(4, None)) as other:
        FlashAttention(model.batch, "fa3", io=Borrowed(model.io.caches), arrays=as_it_is)
        with pytest.raises(kv.InputError, match="io: .* is not a KVIO of this batch's caches"):
            FlashAttention(model.batch, "fa3", io=Borrowed(other.io.caches), arrays=as_it_is)
