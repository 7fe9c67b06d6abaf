"""Pages over time as a picture, and a replay as one HTML file that needs no other.

Knows matplotlib (extra ``viz``, imported when a picture is drawn) and HTML. Does not know how a replay runs.
"""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING

from numba_kv.errors import InputError, NumbaKVError
from numba_kv.geometry import ceil_div
from numba_kv.replay.figures import GroupFigures, PageHistory, ReplayFigures
from numba_kv.replay.sizes import format_bytes
from numba_kv.replay.tables import figure_rows, group_notes, group_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MissingExtraError", "check_drawing", "check_picture", "write_picture", "write_report"]

#: Share of a bound that the peak reaches at least where the bound is drawn as a line.
_LEAST_SHARE = 0.2
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .8rem; text-align: left; }
td { font-variant-numeric: tabular-nums; }
img { max-width: 100%; }
"""


class MissingExtraError(NumbaKVError, ImportError):
    """A package of one of numba_kv's extras is not installed."""


def check_drawing() -> None:
    """Raise before the work, rather than after it, if no picture could be drawn.

    Raises
    ------
    MissingExtraError
        If matplotlib is absent.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"pictures need matplotlib ({error}); in a clone of numba_kv, install it with: pip install -e '.[viz]'"
        ) from None


def check_picture(path: Path) -> None:
    """Raise before the work, rather than after it, if no picture could be drawn, or not as what the name of `path` ends with.

    Raises
    ------
    MissingExtraError
        If matplotlib is absent.
    InputError
        If the file type is unknown.
    """
    check_drawing()
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    kind = path.suffix[1:].lower()
    if kind and kind not in kinds:
        raise InputError(f"--picture: {path.name} ends with {kind!r}, which is none of {', '.join(sorted(kinds))}")


def write_picture(path: Path, figures: ReplayFigures, history: PageHistory) -> None:
    """Write pages over time, one panel per window group, as the file type that the name of `path` ends with.

    Raises
    ------
    MissingExtraError
        If matplotlib is absent.
    InputError
        If the file cannot be written or its type is unknown.
    """
    figure = _draw(figures, history)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InputError(f"picture {path} cannot be written: {error}") from None


def write_report(path: Path, figures: ReplayFigures, history: PageHistory) -> None:
    """Write the figures and the picture as one HTML file.

    Raises
    ------
    MissingExtraError
        If matplotlib is absent.
    InputError
        If the file cannot be written.
    """
    picture = io.BytesIO()
    _draw(figures, history).savefig(picture, format="png", dpi=120)
    text = _page(figures, base64.b64encode(picture.getvalue()).decode("ascii"))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"report {path} cannot be written: {error.strerror or error}") from None


def _draw(figures: ReplayFigures, history: PageHistory) -> Figure:
    check_drawing()
    # The object interface: no global state, no display.
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    groups = figures.groups
    figure = Figure(figsize=(12, 1 + 2.8 * len(groups)), layout="constrained")
    what = f"{figures.config}, {figures.sequences:,} sequences of {figures.trace} ({figures.target})"
    figure.suptitle(f"KV pages over time: {what}")
    panels = figure.subplots(len(groups), squeeze=False, sharex=True)[:, 0]
    for axes, group, pages in zip(panels, groups, history.pages, strict=True):
        axes.fill_between(history.steps, pages, step="post", alpha=0.35, color="tab:blue")
        axes.plot(history.steps, pages, drawstyle="steps-post", color="tab:blue", label="pages held")
        _draw_bound(axes, figures, group)
        title = f"{group.window} attention, {group.layers} layers: at most {format_bytes(group.peak_pages * group.page_nbytes)}"
        if group.ring_pages:
            unbounded = [ceil_div(tokens, group.page_tokens) for tokens in history.tokens]
            axes.plot(history.steps, unbounded, color="0.45", linewidth=0.9, label="if every token\nwere kept")
            title += f" instead of {format_bytes(group.every_token_nbytes)} (rings are taken whole at admission)"
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_ylabel(f"pages of {group.page_tokens} tokens")
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
            axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
        # Beside the panel, so that it hides no line.
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)
    panels[-1].set_xlabel("step")
    return figure


def _draw_bound(axes: Axes, figures: ReplayFigures, group: GroupFigures) -> None:
    what = f"{figures.rows} rows x ring of {group.ring_pages}" if group.ring_pages else "the pool"
    label = f"bound: {group.bound_pages:,}\n({what})"
    if group.peak_pages >= _LEAST_SHARE * group.bound_pages:
        axes.axhline(group.bound_pages, color="tab:red", linestyle="--", label=label)
    else:  # a line so far up would press the curve flat
        axes.plot([], [], linestyle="none", label=f"{label},\nabove this panel")


def _page(figures: ReplayFigures, picture: str) -> str:
    title = html.escape(f"Replay on the caches of {figures.config}")
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>\n" for name, text in figure_rows(figures)
    )
    names, *lines = group_rows(figures)
    heads = "".join(f"<th>{name}</th>" for name in names)
    groups = ""
    for line in lines:
        groups += "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in line) + "</tr>\n"
    notes = "".join(f"<p>{html.escape(note)}</p>\n" for note in group_notes(figures))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n<table>\n{rows}</table>\n"
        f"<h2>Pages</h2>\n<table>\n<tr>{heads}</tr>\n{groups}</table>\n{notes}"
        f'<img alt="Pages over time" src="data:image/png;base64,{picture}">\n</body>\n</html>\n'
    )
