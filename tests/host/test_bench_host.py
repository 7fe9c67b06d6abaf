"""What ``bench host`` reports."""

from __future__ import annotations

import pytest

from numba_kv.replay import bench, bench_host
from numba_kv.replay.bench_tables import bench_table


def test_each_way_is_held_against_a_plain_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    point = bench_host.HostPoint(layers=2, heads=1, dim=8, page_tokens=4, pages=1024)
    assert (point.page_nbytes, point.nbytes) == (256, 1 << 18)
    found = bench_host.measure_point(point, None)
    for way in ("out", "back"):
        plain = found[f"plain_{way}_gb_per_s"]
        for what in ("pages", "swap"):
            assert found[f"{what}_{way}_of_plain"] == pytest.approx(found[f"{what}_{way}_gb_per_s"] / plain, abs=0.01)
    monkeypatch.setattr(bench_host, "measure_host", lambda target: {"target": "cpu", "points": [found]})
    assert bench_table(bench.bench("host", bench.BenchOptions())) is not None
