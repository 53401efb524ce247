"""The run as a picture: its loss, where faults struck, and how many replicas were alive.

matplotlib's object interface with the Agg canvas: no global state, no display, any thread.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from checkpointing.whole_file import write_whole
from elastic.protocol.causes import known_causes
from elastic.protocol.events import Evaluated, Event, StepRecord
from elastic.reporting.incidents import Incident
from elastic.reporting.report import Report

PICTURE = "run.png"
WIDTH_PX, HEIGHT_PX, DPI = 1200, 700, 100

_INK, _QUIET, _GRID = "#1f2933", "#6b7785", "#e4e8ed"
_LOSS, _VALIDATION, _REPLICAS = "#1f5fa8", "#d9820a", "#3a8f5c"
_MIXED = "#c8322b"
"""Colour of an incident of several causes."""
_MAX_LABELS = 12
_LABEL_WIDTH = 0.02
"""Width of an upright label, as a share of the axes' width."""
_LABEL_TOPS = (0.98, 0.64, 0.32)
"""Rows in which labels of neighbouring incidents can stand, as a share of the axes' height."""


def draw(
    run_dir: str | os.PathLike[str],
    report: Report,
    steps: Sequence[StepRecord],
    events: Sequence[Event],
) -> Path:
    """Draw `run.png` into the run directory and return its path.

    Args:
        run_dir: the run directory.
        report: what `build_report` made of `steps` and `events`.
        steps: as `read_steps` gives them.
        events: as `read_events` gives them.
    """
    figure = Figure(figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    loss, replicas = figure.subplots(
        2, 1, sharex=True, height_ratios=(5, 1),
        gridspec_kw={"left": 0.065, "right": 0.98, "top": 0.875, "bottom": 0.085, "hspace": 0.08},
    )  # fmt: skip
    _draw_loss(loss, steps, events)
    _draw_replicas(replicas, report, steps)
    _draw_incidents(loss, replicas, report.incidents)
    _draw_titles(figure, report)
    figure.legend(
        *loss.get_legend_handles_labels(), loc="upper right", bbox_to_anchor=(0.985, 0.995),
        ncols=8, frameon=False, fontsize=10, labelcolor=_INK,
    )  # fmt: skip
    path = Path(run_dir) / PICTURE
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_whole(path, image.getvalue())
    return path


def _draw_loss(axes: Axes, steps: Sequence[StepRecord], events: Sequence[Event]) -> None:
    x, y = [s.step for s in steps], [s.loss for s in steps]
    # Where a mean would only hide the few points there are, the line itself is the picture.
    if len(y) < 100:
        axes.plot(x, y, color=_LOSS, lw=1.8, label="loss")
    else:
        axes.plot(x, y, color=_LOSS, lw=1, alpha=0.35)
        axes.plot(x, _running_mean(y), color=_LOSS, lw=2, label="loss, running mean")
    evaluated = [e for e in events if isinstance(e, Evaluated)]
    if evaluated:
        axes.plot(
            [e.step for e in evaluated], [e.val_loss for e in evaluated], color=_VALIDATION,
            lw=1.2, marker="o", ms=5, label="validation loss",
        )  # fmt: skip
    _style(axes)
    axes.set_ylabel("loss, nats per token", color=_INK)


def _draw_replicas(axes: Axes, report: Report, steps: Sequence[StepRecord]) -> None:
    x, alive = [s.step for s in steps], [s.replicas for s in steps]
    axes.fill_between(x, alive, step="post", color=_REPLICAS, alpha=0.25, lw=0)
    axes.step(x, alive, where="post", color=_REPLICAS, lw=1.8)
    _style(axes)
    top = max([report.layout.get("replicas", 1), *alive])
    axes.set_ylim(0, top * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("replicas", color=_INK)
    axes.set_xlabel("step", color=_INK)


def _draw_incidents(loss: Axes, replicas: Axes, incidents: Sequence[Incident]) -> None:
    """A line at each incident, with what happened beside it; many share a legend instead."""
    many = len(incidents) > _MAX_LABELS
    known = {name: entry.color for name, entry in known_causes().items()}
    left, right = loss.get_xlim()
    label_end_x = [left] * len(_LABEL_TOPS)
    steps: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for incident in incidents:
        steps[incident.cause, incident.regrouped].append(incident.step)
        if not many:
            row = next((i for i, x in enumerate(label_end_x) if x <= incident.step), 0)
            label_end_x[row] = incident.step + _LABEL_WIDTH * (right - left)
            _draw_label(loss, incident, _LABEL_TOPS[row], known.get(incident.cause, _MIXED))
    seen: set[str] = set()
    for (cause, regrouped), at in steps.items():
        label = cause if many and cause not in seen else ""
        seen.add(cause)
        for axes in (loss, replicas):
            lines = LineCollection(  # ten thousand of them, drawn at once
                [((step, 0), (step, 1)) for step in at],
                transform=axes.get_xaxis_transform(),
                colors=known.get(cause, _MIXED),
                linestyles="-" if regrouped else ":",
                linewidths=0.7 if many else 1.3,
                zorder=1,
                label=label if axes is loss else "",
            )
            axes.add_collection(lines, autolim=False)


def _draw_label(axes: Axes, incident: Incident, top: float, color: str) -> None:
    axes.annotate(
        _label(incident), (incident.step, top), xycoords=("data", "axes fraction"),
        xytext=(4, 0), textcoords="offset points", rotation=90, ha="left", va="top",
        color=color, fontsize=9.5,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
    )  # fmt: skip


def _label(incident: Incident) -> str:
    what = incident.cause if incident.regrouped else f"spare, {incident.cause}"
    return what if incident.stall_s is None else f"{what}: stalled {incident.stall_s:.2f} s"


def _draw_titles(figure: Figure, report: Report) -> None:
    figure.text(
        0.065, 0.948, report.name or "run",
        fontsize=16, weight="bold", color=_INK, parse_math=False,  # a name may have two $
    )  # fmt: skip
    facts = [f"{report.outcome}, {report.steps} steps"]
    if report.effective_time is not None:
        facts.append(f"{100 * report.effective_time:.2f} % effective time")
    if report.longest_stall_s is not None:
        facts.append(f"longest stall {report.longest_stall_s:.2f} s")
    facts.append(f"regroups {report.regroups}")
    facts.append(f"steps repeated {report.repeated_steps}, lost {report.lost_steps}")
    figure.text(0.065, 0.903, "   ·   ".join(facts), fontsize=11, color=_QUIET)


def _style(axes: Axes) -> None:
    axes.grid(color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, labelcolor=_INK)
    axes.margins(x=0.01)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_QUIET)


def _running_mean(values: Sequence[float]) -> list[float]:
    """The mean over a centred window of about a fiftieth of the values, narrower at both ends."""
    half = len(values) // 100
    total = [0.0]
    for value in values:
        total.append(total[-1] + value)
    edges = ((max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values)))
    return [(total[b] - total[a]) / (b - a) for a, b in edges]
