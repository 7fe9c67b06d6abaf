"""What only a GPU shows of rotary tables: how long they take to build, and a gather inside a graph behind a busy stream."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kv.device import create_device
from numba_kv.dtypes import dtype
from numba_kv.kernels.rope_tables import fill_rope
from tests.helpers.ropes import expected, opened, plain, rope

pytestmark = pytest.mark.gpu


def test_a_long_table_is_built_in_a_millisecond() -> None:
    device = create_device("cuda")
    with opened(device) as cache:
        table = cache.table(rope(dim=128, theta=5e5, positions=131072), 131072)
        scalars = {"variant": 0, "first_row": 0, "length": 131072}
        launch = fill_rope.bind(device, {"table": table.rows, **table._constants, **scalars})
        times = []
        for _ in range(10):
            start = device.stream.record(timing=True)
            launch(131072 * 64, device.stream)
            times.append(device.stream.record(timing=True).microseconds_since(start))
        assert min(times) < 1000
        found = table.tensor[0, 131000:].to_host()
        assert np.abs(found - expected(plain(128, 5e5), range(131000, 131072))).max() < 1e-6


def test_a_table_is_the_same_on_the_gpu_and_on_the_host() -> None:
    config = rope("yarn", 1.5e5, 64, 131072, factor=32.0, original_max_position_embeddings=4096, truncate=False)
    with opened(create_device("cuda")) as there, opened(create_device("cpu")) as here:
        a, b = (cache.table(config, 5000).tensor.to_host() for cache in (there, here))
        assert np.abs(a - b).max() <= 2**-23  # fused products may round the last bit another way


def test_a_captured_gather_reads_positions_of_the_replay() -> None:
    device = create_device("cuda")
    with opened(device) as cache:
        table = cache.table(rope(), 600)
        positions = device.tensor((512,), dtype("int32"))
        gather = cache.gather(table, positions, capacity=600)
        gather(512)
        graph = device.capture(lambda stream: gather(512, stream) and None)
        rows = table.tensor.to_host()[0]
        for seed in range(3):
            values = np.random.default_rng(seed).integers(-1, 601, 512).astype(np.int32)
            positions.fill_from(values)
            graph.launch(device.stream)
            known = (values >= 0) & (values < 600)
            assert np.array_equal(gather.rows.to_host(), np.where(known[:, None], rows[np.clip(values, 0, 599)], 0))
        graph.close()
