"""Bound calls of KVIO on a real driver: captured, in threads without a context, and on streams without order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.device import create_device
from numba_kv.dtypes import dtype
from tests.helpers.models import tiny_config
from tests.helpers.threads import in_a_thread

pytestmark = pytest.mark.gpu


def test_a_bound_call_runs_captured_and_in_any_thread() -> None:
    config = tiny_config(None, heads=(2, 64), kv_cache_dtype="float32")
    with kv.SharedResources.create_for_llm(config, target="cuda") as resources:
        batch, caches, device = kv.Batch(resources), resources.cache_managers[0], resources.device
        with kv.KVIO(caches) as io:
            view = batch.step({batch.admit(num_tokens=5): 5})
            k = device.tensor((5, 2, 64), dtype("float32"))
            k.fill_from(np.ones(k.shape, np.float32))
            write = io.bind_write(0, k, k, view)

            def written(run: Callable[[], object]) -> float:
                pool = caches.kv(0)
                pool.fill_from(np.zeros(pool.shape, np.float32))
                run()
                return float(pool.to_host().sum())

            everything = 2.0 * k.size
            assert written(write) == everything
            assert written(lambda: in_a_thread(write)) == everything  # no context is current there
            graph = device.capture(lambda stream: write(stream=stream))
            assert written(lambda: graph.launch(device.stream)) == everything
            graph.close()
            foreign = device.as_stream(None)
            with pytest.raises(kv.StateError, match="stream"):
                write(stream=foreign)
            foreign.close()
            assert written(lambda: write(2)) == everything * 2 / 5


def test_what_borrows_the_caches_may_be_closed_after_them() -> None:
    config = tiny_config(None, heads=(2, 64), kv_cache_dtype="float8_e4m3")
    resources = kv.SharedResources.create_for_llm(config, target="cuda")
    io = kv.KVIO(resources.cache_managers[0])
    attention = kv.PagedAttention(resources.cache_managers[0], io)
    io.set_scales(0, 1.0, 1.0)
    io.copy_pages(0, [(0, 1)])
    resources.close()
    attention.close()
    io.close()
    assert resources.device.memory.current_bytes == resources.device.pinned.current_bytes == 0


def test_another_current_device_stays_current() -> None:
    from cuda.bindings import driver

    if driver.cuDeviceGetCount()[1] < 2:
        pytest.skip("needs two devices")
    config = tiny_config(None, heads=(2, 64), kv_cache_dtype="float32")
    with kv.SharedResources.create_for_llm(config, target="cuda") as resources:
        batch, caches, device = kv.Batch(resources), resources.cache_managers[0], resources.device
        with kv.KVIO(caches) as io:
            view = batch.step({batch.admit(num_tokens=5): 5})
            k = device.tensor((5, 2, 64), dtype("float32"))
            k.fill_from(np.ones(k.shape, np.float32))
            write = io.bind_write(0, k, k, view)

            def work() -> None:
                create_device("cuda", 1)  # is current from now on
                before = int(driver.cuCtxGetCurrent()[1])
                write()
                assert int(driver.cuCtxGetCurrent()[1]) == before

            in_a_thread(work)
            assert caches.kv(0).to_host().sum() == 2 * k.size
