"""Figures of this machine: what ``numba-kv bench`` measures.

Knows how to time things honestly: warm up, repeat, take the median. Does not know what a good figure is. A measure is a
function from `BenchOptions` to plain objects; a new one goes into `MEASURES`.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from numba_kv.config import load_engine_config
from numba_kv.errors import InputError
from numba_kv.replay.bench_step import median_us
from numba_kv.replay.figures import Latency
from numba_kv.replay.fresh_python import run_python
from numba_kv.replay.generate import generate_trace
from numba_kv.replay.models import find_config

__all__ = ["MEASURES", "BenchOptions", "Measure", "bench"]

_MODEL = "gemma3_270m"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured.

    Attributes
    ----------
    rows : int
        Sequences of a step.
    repeat : int
        Steps that are timed.
    target : str or None
        Where; None: the default target.
    """

    rows: int = 256
    repeat: int = 2000
    target: str | None = None


Measure = Callable[[BenchOptions], dict[str, object]]


def _milliseconds(code: str) -> float:
    start = time.perf_counter()
    run_python(code)
    return (time.perf_counter() - start) * 1e3


def measure_import(options: BenchOptions) -> dict[str, object]:
    """Time ``import numba_kv`` in fresh processes, above a bare Python, and list the heavy packages it loads."""
    processes = 15
    ours, bare = [], []
    for _ in range(processes):  # in turns, so that both see the same machine
        bare.append(_milliseconds("pass"))
        ours.append(_milliseconds("import numba_kv"))
    heavy = ("numpy", "ml_dtypes", "numba", "cuda", "rich")
    loaded = run_python(f"import sys, numba_kv; print(*(m for m in {heavy!r} if m in sys.modules))").split()
    # Whatever else the machine does only adds time: the fastest runs are compared, and how far a run lies above the fastest
    # says how small a difference can be told.
    difference, spread = min(ours) - min(bare), statistics.median(bare) - min(bare)
    return {
        "bare_python_ms": round(min(bare), 2),
        "import_ms": round(max(0.0, difference), 2),
        "spread_ms": round(spread, 2),
        "is_within_noise": difference <= spread,
        "loads": loaded,
        "processes": processes,
    }


def measure_advance(options: BenchOptions) -> dict[str, object]:
    """Time a steady decode step of every row, full and window group, on the host."""
    from numba_kv.batch import Batch
    from numba_kv.shared_resources import SharedResources

    prompt, warm = 600, 50
    config = load_engine_config(
        find_config(_MODEL),
        max_batch_size=options.rows,
        max_kv_cache_capacity=prompt + warm + options.repeat,
        max_batch_tokens=prompt * options.rows,
    )
    times = array("q")
    with SharedResources.create_for_llm(config, target=options.target) as resources, Batch(resources) as batch:
        sequences = batch.update(retire=[], admit=[prompt] * options.rows)
        batch.step(dict.fromkeys(sequences, prompt))
        for i in range(warm + options.repeat):
            start = time.perf_counter_ns()
            batch.step(1)
            took = time.perf_counter_ns() - start
            if i >= warm:
                times.append(took)
        batch.audit()
        target = resources.device.target
    return {
        "target": target,
        "rows": options.rows,
        "groups": len(resources.plan.groups),
        "host_us_per_step": asdict(Latency.of(times)),
    }


def measure_replay(options: BenchOptions) -> dict[str, object]:
    """Replay made-up requests on the caches of the demo's model."""
    from numba_kv.replay.run import ReplayOptions, replay
    from numba_kv.shared_resources import SharedResources

    trace, rows, chunk = generate_trace(200), 64, 2048
    config = load_engine_config(
        find_config(_MODEL), max_batch_size=rows, max_kv_cache_capacity=trace.longest, max_batch_tokens=rows + chunk
    )
    with SharedResources.create_for_llm(config, target=options.target) as resources:
        figures = replay(resources, trace, ReplayOptions(chunk=chunk, audit_every=0)).figures.to_json()
    kept = ("target", "sequences", "steps", "tokens", "wall_s", "us_per_step", "us_per_steady_step", "bytes_to_device_steady")
    return {name: figures[name] for name in kept}


def measure_copy(options: BenchOptions) -> dict[str, object]:
    """Time a large copy in host memory: the limit that everything which moves bytes there is held against."""
    import numpy as np

    nbytes = 256 << 20
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    # Each byte is read once and written once.
    return {"host_copy_gb_per_s": round(2 * nbytes / statistics.median(times) / 1e9, 2), "nbytes": nbytes}


def measure_step(options: BenchOptions) -> dict[str, object]:
    """Time a decode step's bookkeeping over rows, contexts, groups and page sizes, beside other ways to do it."""
    from numba_kv.adapters import torch_kv, torch_timing, triton_tables
    from numba_kv.device import resolve_target
    from numba_kv.replay.bench_step import measure_point, step_points

    target = resolve_target(options.target)
    on_gpu = target == "cuda"
    points = list(step_points(1 << 20 if on_gpu else 1 << 14))
    found: dict[str, object] = {"points": [measure_point(point, target) for point in points]}
    if on_gpu and torch_timing.is_installed():
        base = points[0]
        run = triton_tables.table_step(base.rows, base.groups, base.context // base.page_tokens, base.page_tokens)
        found["triton_tables"] = {
            "rows": base.rows,
            "groups": base.groups,
            "host_us": median_us(run, 200),
            "captured_gpu_us": round(torch_timing.captured_us(run, 50), 3),
        }
        nbytes = 1 << 30
        found["torch_copy_tb_per_s"] = round(2 * nbytes / torch_kv.copy_us(nbytes) / 1e6, 3)  # read and written
    return found


def measure_load(options: BenchOptions) -> dict[str, object]:
    """Time loading weights from files in the page cache onto the device, beside plain copies of the same bytes."""
    from numba_kv.replay.bench_weights import measure_loading

    return measure_loading(options.target)


def measure_data(options: BenchOptions) -> dict[str, object]:
    """Time K and V into pages and out of them, beside a plain copy, torch and Triton."""
    from numba_kv.replay.bench_kv import measure_kv

    return measure_kv(options.target)


def measure_rope(options: BenchOptions) -> dict[str, object]:
    """Time the filling of a rotary table."""
    from numba_kv.replay import bench_adapters

    return bench_adapters.measure_rope(options.target)


def measure_lora(options: BenchOptions) -> dict[str, object]:
    """Time a switch between two adapters."""
    from numba_kv.replay import bench_adapters

    return bench_adapters.measure_lora(options.target)


def measure_prefixes(options: BenchOptions) -> dict[str, object]:
    """Time prefix hits and the naming of blocks on the host, beside plain Python."""
    from numba_kv.replay.bench_reuse import measure_reuse

    return measure_reuse()


def measure_tier(options: BenchOptions) -> dict[str, object]:
    """Time pages that go to page-locked memory and come back, beside a plain copy."""
    from numba_kv.replay.bench_host import measure_host

    return measure_host(options.target)


def measure_rounds(options: BenchOptions) -> dict[str, object]:
    """Time speculative rounds and commits of accepted states."""
    from numba_kv.replay.bench_spec import measure_spec

    return measure_spec(options.target)


#: Name of a measure -> what takes it, in the order of ``all``.
MEASURES: Mapping[str, Measure] = {
    "import": measure_import,
    "advance": measure_advance,
    "replay": measure_replay,
    "copy": measure_copy,
    "step": measure_step,
    "reuse": measure_prefixes,
    "load": measure_load,
    "kv": measure_data,
    "host": measure_tier,
    "rope": measure_rope,
    "lora": measure_lora,
    "spec": measure_rounds,
}


def bench(
    measure: str, options: BenchOptions, on_start: Callable[[str], None] | None = None
) -> dict[str, dict[str, object]]:
    """Take one measure, or all of them; `on_start` is told each name before it begins.

    Raises
    ------
    InputError
        If `measure` is unknown.
    """
    if measure != "all" and measure not in MEASURES:
        raise InputError(f"MEASURE: {measure!r} is not one of {', '.join(MEASURES)} or all")
    found: dict[str, dict[str, object]] = {}
    for name, take in MEASURES.items():
        if measure in (name, "all"):
            if on_start is not None:
                on_start(name)
            found[name] = take(options)
    return found
