"""FlashInfer's inputs, given to NumPy wrappers with its signatures, against float64 attention over all that was written.

Each row is attended with NaN in every page that is not its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.adapters.flashinfer import FlashInfer
from tests.helpers.models import chunked, tiny_config
from tests.helpers.paged_kernels import DecodeWrapper, PrefillWrapper
from tests.helpers.written_batch import GROUP, WrittenBatch, written

HEADS = (2, 64)


def as_it_is(value: Any) -> Any:
    return value


def model_of(page: int, *windows: Any, **limits: Any) -> kv.LLMEngineConfig:
    rows = {"max_kv_cache_capacity": 128, "max_batch_tokens": 1024, "max_batch_size": 4}
    kinds = {"kv_cache_dtype": "float16", "max_step_tokens": 3, "heads": HEADS}
    return tiny_config(*windows, page_tokens=page, **{**rows, **kinds, **limits})


def compare(model: WrittenBatch, layer: int, q: np.ndarray, wrapper: Any, layout: str, scales: dict[str, float]) -> None:
    """Run a planned wrapper once a row, over pages of that row alone."""
    expected = model.expected(layer, q)
    for sequence in model.counts:
        pools = tuple(model.poisoned(layer, half, sequence.row) for half in (0, 1))
        out = wrapper.run(q, tuple(p.swapaxes(1, 2) for p in pools) if layout == "HND" else pools, **scales)
        tokens = model.tokens_of(sequence)
        assert np.allclose(out[tokens], expected[tokens], rtol=0, atol=1e-9), (layer, sequence)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("page", "window"), [(4, 3), (4, 4), (4, 5), (1, 2), (16, 15), (16, 17)])
def test_every_row_of_every_step(page: int, window: int, layout: str) -> None:
    with written(model_of(page, None, window, chunked(2 * page))) as model:
        infer, decodes, sent = FlashInfer(model.batch, kv_layout=layout, arrays=as_it_is), 0, 0
        for view in model.life([5, 40, 1], 3, 8):
            step, before = infer.step(view), model.resources.device.bytes_to_device
            for layer in range(3):
                heads = GROUP * HEADS[0]
                if layer and view.is_long:
                    with pytest.raises(kv.InputError, match=r"view.carry_slots\[\d\] \(PagedAttention.attend_long does\)"):
                        step.prefill_plan(layer, heads)
                    continue
                if layer == 2 and view.max_query_tokens > 1:
                    with pytest.raises(kv.InputError, match="FlashInfer has no mask for the chunked"):
                        step.prefill_plan(layer, heads)
                    continue
                q, prefill = model.queries(layer, view), PrefillWrapper(layout)
                prefill.plan(**step.prefill_plan(layer, heads))
                compare(model, layer, q, prefill, layout, {})
                if view.max_query_tokens == 1 and view.num_tokens == view.num_rows:
                    decode = DecodeWrapper(layout)
                    decode.plan(**step.decode_plan(layer, heads))
                    compare(model, layer, q, decode, layout, {})
                    decodes += 1
                else:
                    with pytest.raises(kv.InputError, match=r"takes one query of every row.*compact\(\) fills holes"):
                        step.decode_plan(layer, heads)
            sent += model.resources.device.bytes_to_device - before
        assert decodes >= 6
        assert sent == 0


def test_the_arguments_by_name() -> None:
    with written(model_of(4, None, 6)) as model:
        a, b = model.batch.update(admit=[40, 9])
        model.step({a: 40, b: 9})
        view = model.step({a: 1, b: 1})
        infer = FlashInfer(model.batch, arrays=as_it_is)
        assert infer.needs_host_lengths
        step = infer.step(view)
        plan = step.decode_plan(1, 4, "bfloat16")
        described = {name: value for name, value in plan.items() if name not in ("indptr", "indices", "last_page_len")}
        assert described == {
            "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 4, "window_left": 5,
            "q_data_type": "bfloat16", "kv_data_type": "float16",
        }  # fmt: skip
        # tokens 35 to 40 and 4 to 9 are seen: pages 8 to 10 and 1 to 2
        assert plan["indptr"].tolist() == [0, 3, 5]
        assert plan["last_page_len"].tolist() == [1, 2]
        blocks = view.block_tables[1].to_host()
        assert plan["indices"].to_host().tolist() == [*blocks[0, 8:11], *blocks[1, 1:3]]
        prefill = step.prefill_plan(0, 4)
        assert (prefill["window_left"], prefill["causal"], prefill["head_dim_qk"]) == (-1, True, 64)
        assert prefill["qo_indptr"].tolist() == [0, 1, 2]
        assert prefill["q_data_type"] == prefill["kv_data_type"] == "float16"


@pytest.mark.parametrize("pages", ["NHD", "HND", ("HND", "NHD"), ("NHD", "HND")])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pools_are_shared_in_either_layout(layout: str, pages: str | tuple[str, ...]) -> None:
    with written(model_of(4, None, 6, kv_layout=pages)) as model:
        infer = FlashInfer(model.batch, kv_layout=layout, arrays=as_it_is)
        (a,) = model.batch.update(admit=[5])
        step = infer.step(model.step({a: 5}))
        for layer in (0, 1):
            k, v = step.kv(layer)
            assert (k.address, v.address) == (model.caches.k(layer).address, model.caches.v(layer).address)
            assert k.strides == v.strides
            pool = model.caches.by_token(layer)[0].to_host()
            assert np.array_equal(k.to_host(), pool.swapaxes(1, 2) if layout == "HND" else pool)
            as_they_lie = model.caches.k(layer)
            if layout == model.caches.storage(layer).kv_layout:
                assert (k.shape, k.strides) == (as_they_lie.shape, as_they_lie.strides)
            assert infer.kv(layer)[0] is k


def test_torch_s_arrays_are_the_default() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    with written(model_of(4, None, 6, kv_cache_dtype="bfloat16")) as model:
        infer = FlashInfer(model.batch, kv_layout="HND")
        (a,) = model.batch.update(admit=[9])
        model.step({a: 9})
        step = infer.step(model.step({a: 1}))
        plan, (k, _) = step.decode_plan(1, 4), step.kv(1)
        assert (plan["indptr"].device.type, plan["indptr"].dtype) == ("cpu", torch.int32)
        assert plan["indices"].data_ptr() == model.batch.derived.csr(1).kv_indices.address
        assert (k.dtype, k.data_ptr()) == (torch.bfloat16, model.caches.k(1).address)
        assert not k.is_contiguous()


def test_float8_comes_with_one_scale_for_all_heads() -> None:
    with written(model_of(4, None, 6, kv_cache_dtype="float8_e4m3"), (0.5, 2.0)) as model:
        infer = FlashInfer(model.batch, io=model.io, arrays=as_it_is)
        assert infer.scales(0) == {"k_scale": 0.5, "v_scale": 2.0}
        for view in model.life([3, 3, 1], 3, 2):
            for layer in (0, 1):
                q, wrapper = model.queries(layer, view), PrefillWrapper()
                plan = infer.step(view).prefill_plan(layer, 4, "bfloat16")
                assert (plan["q_data_type"], plan["kv_data_type"]) == ("bfloat16", "float8_e4m3fn")
                wrapper.plan(**plan)
                compare(model, layer, q, wrapper, "NHD", infer.scales(layer))
        with pytest.raises(kv.StateError, match="give FlashInfer its io="):
            FlashInfer(model.batch, arrays=as_it_is).scales(0)
        model.io.set_scales(1, np.array([0.5, 0.25], np.float32), 1.0)
        with pytest.raises(kv.InputError, match="heads of layer 1 have scales of their own"):
            infer.scales(1)
    with written(model_of(4, None)) as model:
        for io in (None, model.io):
            assert FlashInfer(model.batch, io=io, arrays=as_it_is).scales(0) == {}


def test_lengths_that_the_host_does_not_know_are_refused() -> None:
    with written(model_of(4, None, 6)) as model:
        a, b = model.batch.update(admit=[9, 9])
        model.step({a: 9, b: 9})
        accepted = model.resources.device.tensor((4,), kv.dtype("int32"))
        view = model.batch.step(1, accepted=accepted)
        infer = FlashInfer(model.batch, arrays=as_it_is)
        with pytest.raises(kv.StateError, match=r"call sync_lengths\(\) first"):
            infer.step(view).decode_plan(0, 4)
        model.batch.sync_lengths()
        assert infer.step(view).decode_plan(0, 4)["last_page_len"].tolist() == [1, 1]  # all 9 were taken back
        view = model.batch.step({a: 1}, counts=accepted)
        with pytest.raises(kv.InputError, match=r"fewer tokens than they have queries \(counts=\)"):
            infer.step(view)


def test_bad_arguments() -> None:
    with written(model_of(4, None, chunked(6))) as model, written(model_of(4, None, heads=(1, 32))) as other:
        (a,) = model.batch.update(admit=[2])
        model.step({a: 2})
        view = model.step({a: 1})
        infer = FlashInfer(model.batch, arrays=as_it_is)
        with pytest.raises(kv.InputError, match="kv_layout: 'NDH' is neither"):
            FlashInfer(model.batch, kv_layout="NDH")
        with pytest.raises(kv.InputError, match="batch: NoneType given"):
            FlashInfer(None)  # type: ignore[arg-type]
        with pytest.raises(kv.InputError, match="io: .* is not a KVIO of this batch's caches"):
            FlashInfer(model.batch, io=other.io)
        for heads in (3, 0, True, "4", 2.0):
            with pytest.raises(kv.InputError, match="num_qo_heads: .* is not a multiple of the 2 KV heads of layer 0"):
                infer.step(view).decode_plan(0, heads)
        with pytest.raises(kv.InputError, match="chunks do not begin with a page of 4 tokens"):
            infer.step(view).decode_plan(1, 4)
        with pytest.raises(kv.ConfigError, match="dtype: 'int5'"):
            infer.step(view).decode_plan(0, 4, "int5")
        (b,) = other.batch.update(admit=[2])
        foreign = other.step({b: 2})
        with pytest.raises(kv.InputError, match="view: .* is not a step of this batch"):
            infer.step(foreign)
        small = FlashInfer(other.batch, arrays=as_it_is)
        for request in (lambda: small.step(foreign).prefill_plan(0, 1), lambda: small.kv(0)):
            with pytest.raises(kv.ConfigError, match="head_dim: .* reads heads of 64 or 128 or 256 channels; .* has 32"):
                request()


@pytest.mark.gpu
def test_a_step_that_is_captured_has_no_plan() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    stream = torch.cuda.Stream()
    with kv.SharedResources.create_for_llm(model_of(4, None), target="cuda", stream=stream) as res, kv.Batch(res) as batch:
        (a,) = batch.update(admit=[3])
        view = batch.step({a: 3})
        infer, other = FlashInfer(batch), torch.ones(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            other.zero_()  # torch warns of a graph without anything
            with pytest.raises(kv.StateError, match=r"plan\(\) is work of the host"):
                infer.step(view)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [4, 16])
def test_the_library_itself(page: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed (pip install flashinfer-python)")
    config = model_of(page, None, page + 1, chunked(2 * page), kv_cache_dtype="bfloat16")
    with written(config) as model:
        stream = torch.cuda.ExternalStream(model.resources.stream.handle)
        infer = FlashInfer(model.batch)
        with torch.cuda.stream(stream):
            space = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD")
        for view in model.life([5, 40, 1], 3, 4):
            step = infer.step(view)
            for layer in range(3):
                if (layer and view.is_long) or (layer == 2 and view.max_query_tokens > 1):
                    continue
                with torch.cuda.stream(stream):
                    q = torch.from_numpy(model.queries(layer, view)).to("cuda", torch.bfloat16)
                    prefill.plan(**step.prefill_plan(layer, 4))
                    outs = [prefill.run(q, step.kv(layer))]
                    if view.max_query_tokens == 1 and view.num_tokens == view.num_rows:
                        decode.plan(**step.decode_plan(layer, 4))
                        outs.append(decode.run(q, step.kv(layer)))
                    found, rounded = [out.double().cpu().numpy() for out in outs], q.double().cpu().numpy()
                expected = model.expected(layer, rounded)
                assert all(np.abs(out - expected).max() < 0.05 for out in found)


def test_a_kvio_is_known_by_its_caches() -> None:
    class Borrowed(kv.KVIO):
        """Another one's caches, as its public face says."""

        def __init__(self, caches: Any) -> None:
            self.given = caches

        @property
        def caches(self) -> Any:
            return self.given

    with written(model_of(4, None)) as model, written(model_of(4, None)) as other:
        FlashInfer(model.batch, io=Borrowed(model.io.caches), arrays=as_it_is)
        with pytest.raises(kv.InputError, match="io: .* is not a KVIO of this batch's caches"):
            FlashInfer(model.batch, io=Borrowed(other.io.caches), arrays=as_it_is)
