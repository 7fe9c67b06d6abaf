"""Picture of ``numba-kv bench step``: microseconds a step over rows, context, groups and page size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numba_kv.replay.report import check_drawing

__all__ = ["plot_steps"]

_BASE = {"rows": 256, "context": 4096, "groups": 2, "page_tokens": 16}
_SERIES = (
    ("plain_host_us", "plain Python, host", "#b0b0b0"),
    ("dispatcher_host_us", "Numba's dispatcher, host", "#e08040"),
    ("step_host_us", "step(), host", "#4060c0"),
    ("bound_host_us", "bound launch, host", "#60a0e0"),
    ("captured_gpu_us", "captured, GPU", "#209060"),
    ("captured_host_us", "captured, host", "#90d0b0"),
)


def plot_steps(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the picture: one panel an axis, every series that was measured."""
    check_drawing()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    for panel, axis in zip(panels, _BASE, strict=True):
        chosen = [p for p in points if all(p[name] == value for name, value in _BASE.items() if name != axis)]
        chosen.sort(key=lambda p: p[axis])
        for key, label, color in _SERIES:
            found = [(p[axis], p[key]) for p in chosen if p.get(key) is not None]
            if found:
                panel.plot(*zip(*found, strict=True), marker="o", markersize=3, color=color, label=label)
        panel.set_xlabel(axis.replace("_", " "))
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
        if axis != "groups":
            panel.set_xscale("log", base=2)
    panels[0].set_ylabel("microseconds a step")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    base = "around 256 rows of 4,096 tokens, 2 groups, pages of 16"
    figure.suptitle(f"Bookkeeping of a decode step ({points[0]['target']}): {base}")
    figure.savefig(path, dpi=120)
