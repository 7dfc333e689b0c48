"""Renders a run as one HTML page without scripts or network access.

It has the verdict, the shares, the times of steps, a time line, communication by operation, and memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean

from polyphase.engine.foreign import for_html
from polyphase.engine.phases import EXPOSED

from .figures import Figures
from .interval import Interval
from .records import Run, compact
from .rules.network import link_use
from .verdict import Verdict, name, rate_text

__all__ = ["page"]

_COLORS = {
    "compute": "#3b82c4",
    "communication": "#e08a1e",
    "waiting": "#c8453b",
    "bubble": "#d9b13b",
    "data_wait": "#8b5fbf",
    "copy": "#b58bd9",
    "optimizer": "#2a9d74",
    "callbacks": "#d4689a",
    "logging": "#a8577a",
    "validation": "#7aa83a",
    "checkpoint": "#8a6d3b",
    "engine": "#8a8f98",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5d6675; --paper: #ffffff; --card: #f4f6f9; --line: #d9dee6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #9aa3b2; --paper: #14181f; --card: #1d232d; --line: #323a47; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 24px 16px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 32px 0 8px; }
p.soft, .soft { color: var(--soft); margin: 0 0 8px; }
.finding { background: var(--card); border-left: 4px solid #c8453b; border-radius: 6px; padding: 12px 16px;
  margin: 12px 0; }
.finding b { font-size: 16px; } .gain { float: right; color: #2a9d74; font-weight: 600; }
.finding code { display: block; white-space: pre-wrap; overflow-wrap: anywhere; margin-top: 6px; font-size: 13px; }
.fine { border-left-color: #2a9d74; }
svg { width: 100%; display: block; border-radius: 3px; }
.ends { display: flex; justify-content: space-between; font-size: 12px; }
.row { display: flex; align-items: center; gap: 8px; margin-bottom: 2px; } .row span { flex: 0 0 64px; margin: 0; }
.operation span { flex: 0 0 112px; overflow-wrap: anywhere; } .operation span:last-child { flex: 0 0 150px; }
.legend span { display: inline-block; margin: 0 14px 4px 0; white-space: nowrap; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
td, th { padding: 3px 12px 3px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
"""
_WIDTH = 1000
_MAX_COLUMNS, _MAX_ROWS = 128, 32
_SHOWN_MB, _SHOWN_SHARE = 1.0, 0.0005
"""Memory and shares below which there is nothing to look at."""


def page(run: Run, verdict: Verdict) -> str:
    """Returns the whole page."""
    figures = verdict.figures
    if not figures.totals:
        return _document("<h1>Doctor</h1><p>No step was measured.</p>")
    info = figures.info
    sizes = " &times; ".join(f"{for_html(axis)}={size}" for axis, size in info.layout.items() if size > 1)
    head = (
        f"<h1>{for_html(info.strategy)} on {for_html(info.device)}{f', {sizes}' if sizes else ''}</h1>"
        f'<p class="soft">{figures.num_steps:,} steps of {1e3 * figures.step_s:.3g} ms on {len(figures.totals)} ranks,'
        " without the first ones</p>"
    )
    if rates := rate_text(figures):
        head += f'<p class="soft">on each device: {for_html(rates)}</p>'
    shares = {phase: share for phase, share in figures.mean_shares().items() if share >= _SHOWN_SHARE}
    legend = "".join(f'<span><i style="background:{_COLORS[p]}"></i>{name(p)} {shares[p]:.1%}</span>' for p in shares)
    parts = [
        head,
        *_findings(verdict),
        f'<h2>Where the time went</h2><p class="legend">{legend}</p>',
        *(f'<p class="soft">rank {rank} ({for_html(run.ranks[rank].host)})</p>{_bands(run.intervals[rank])}'
          for rank in _few(sorted(figures.totals))),
        f"<h2>Time of a step, by rank</h2>{_heat(run)}",
        *_time_line(run),
        *_communication(figures),
        *_memory(run),
        *_model_memory(run),
        f'<h2>Shares by rank</h2><div class="scroll">{_table(verdict)}</div>',
    ]  # fmt: skip
    return _document("\n".join(parts))


def _document(body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width, initial-scale=1"><title>Doctor</title><style>{_STYLE}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def _findings(verdict: Verdict) -> Iterable[str]:
    for caveat in verdict.caveats:
        yield f'<p class="soft">Note: {for_html(caveat)}</p>'
    if not verdict.findings and not verdict.caveats:
        yield '<div class="finding fine"><b>Nothing stands out</b></div>'
    for finding in verdict.findings:
        gain = "" if finding.gain is None else f'<span class="gain">up to {finding.gain:.0%} less time</span>'
        yield (
            f'<div class="finding">{gain}<b>{for_html(name(finding.cause))}</b><br>{for_html(finding.evidence)}'
            f"<code>{for_html(finding.remedy)}</code></div>"
        )


def _few(ranks: Sequence[int]) -> Sequence[int]:
    return ranks if len(ranks) <= 8 else [*ranks[:4], *ranks[-4:]]


def _bands(intervals: Sequence[Interval]) -> str:
    """Returns a picture of the shares of each interval: stacked columns with the interval's duration as width."""
    intervals = _columns(intervals)
    height, total = 90, max(sum(interval.wall_s for interval in intervals), 1e-12)
    columns, x = [], 0.0
    for interval in intervals:
        width, y = _WIDTH * interval.wall_s / total, 0.0
        for phase in _COLORS:
            part = height * interval.seconds.get(phase, 0.0) / max(interval.wall_s, 1e-12)
            if part > 0.2:
                tip = f"{name(phase)} {part / height:.1%}, to step {interval.step}"
                columns.append(_rect(x, y, width + 0.2, part, f'fill="{_COLORS[phase]}"', tip))
            y += part
        x += width
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" style="height:{height}px" role="img"'
        f' aria-label="shares over time">{"".join(columns)}</svg>'
        f'<p class="soft ends"><span>0 s</span><span>{total:.3g} s</span></p>'
    )


def _heat(run: Run) -> str:
    """Returns a heat map of each rank's own busy time per step: one row per rank, one column per interval.

    The first steps are left out if there are others, since they would dominate the colours.
    """
    settled = {
        rank: [i for i in intervals if not i.is_warmup] or intervals for rank, intervals in run.intervals.items()
    }
    rows = {rank: _busy(intervals) for rank, intervals in settled.items()}
    slowest = sorted(rows, key=lambda rank: -sum(rows[rank]) / max(len(rows[rank]), 1))[:_MAX_ROWS]
    most = max((ms for rank in slowest for ms in rows[rank]), default=0.0) or 1.0
    few = "" if len(rows) <= _MAX_ROWS else f"; the {_MAX_ROWS} slowest ranks of {len(rows)}"
    note = f"without waiting for others, saves, validation and the first steps; the darkest is {most:.3g} ms{few}"
    parts = [f'<p class="soft">{note}</p>']
    for rank in sorted(slowest):
        cells = "".join(
            _rect(x, 0, 1, 1, f'fill="#c8453b" fill-opacity="{0.06 + 0.94 * ms / most:.2f}"', f"{ms:.3g} ms")
            for x, ms in enumerate(rows[rank])
        )
        parts.append(
            f'<div class="row"><span class="soft">rank {rank}</span><svg viewBox="0 0 {max(len(rows[rank]), 1)} 1"'
            f' preserveAspectRatio="none" style="height:20px" role="img" aria-label="steps">{cells}</svg></div>'
        )
    return "".join(parts)


_IN_ORDER = (
    "data_wait", "copy", "compute", "waiting", "bubble", "communication", "optimizer", "callbacks", "logging",
    "validation", "checkpoint", "engine",
)  # fmt: skip
"""The usual order of the phases in a step."""


def _time_line(run: Run) -> Iterable[str]:
    """Yields a median step and the slowest one: for each rank a bar with its phases in order."""
    steps = _median_and_slowest(run)
    most = max((sum(_parts(step).values()) for _, by_rank in steps for step in by_rank.values()), default=0.0)
    if not most:
        return
    yield (
        '<h2>Time line of two steps</h2><p class="soft">phases in the order of a step; one that comes several times is'
        f" drawn once, as long as all of them. The right edge is {1e3 * most:.3g} ms</p>"
    )
    for title, by_rank in steps:
        yield f'<p class="soft" style="margin-top:12px">{title}</p>'
        for rank in sorted(by_rank):
            x, bars = 0.0, []
            for phase, seconds in _parts(by_rank[rank]).items():
                width = _WIDTH * seconds / most
                if width >= 0.2:
                    fill = f'fill="{_COLORS[phase]}"'
                    bars.append(_rect(x, 0, width, 1, fill, f"{name(phase)} {1e3 * seconds:.3g} ms"))
                x += width
            yield (
                f'<div class="row"><span class="soft">rank {rank}</span><svg viewBox="0 0 {_WIDTH} 1"'
                f' preserveAspectRatio="none" style="height:20px; background:var(--card)" role="img"'
                f' aria-label="{title}, rank {rank}">{"".join(bars)}</svg></div>'
            )


def _parts(step: Mapping[str, float]) -> dict[str, float]:
    return {phase: step[phase] for phase in _IN_ORDER if step.get(phase, 0.0) > 0.0}


def _median_and_slowest(run: Run) -> list[tuple[str, dict[int, dict[str, float]]]]:
    """Returns the two steps with their titles, by rank; without steps, means of two intervals."""
    noted: tuple[dict[int, dict[int, dict[str, float]]], ...] = ({}, {})
    for rank in _few(sorted(run.intervals)):
        for interval in run.intervals[rank]:
            for by_step, step in zip(noted, interval.steps, strict=False):
                by_step.setdefault(int(step["step"]), {})[rank] = step
    title = "step {:,}, {}: {:.3g} ms"
    if not noted[0]:
        noted, title = (by_step := _mean_steps(run), by_step), "the mean step up to step {:,}, {}: {:.3g} ms"
    if not noted[0]:
        return []
    medians, slowest = (sorted(steps, key=lambda number: _wall_s(steps[number])) for steps in noted)
    titled = []
    for word, number, by_step in (("a median one", medians[len(medians) // 2], noted[0]),
                                  ("the slowest", slowest[-1], noted[1])):  # fmt: skip
        titled.append((title.format(number, word, 1e3 * _wall_s(by_step[number])), by_step[number]))
    return titled


def _wall_s(by_rank: Mapping[int, Mapping[str, float]]) -> float:
    return sum(step["wall_s"] for step in by_rank.values()) / len(by_rank)


def _mean_steps(run: Run) -> dict[int, dict[int, dict[str, float]]]:
    means: dict[int, dict[int, dict[str, float]]] = {}
    for rank in _few(sorted(run.intervals)):
        for interval in run.intervals[rank]:
            if interval.num_steps and not interval.is_warmup:
                step = {phase: seconds / interval.num_steps for phase, seconds in interval.seconds.items()}
                means.setdefault(interval.step, {})[rank] = {**step, "wall_s": interval.wall_s / interval.num_steps}
    return means


def _memory(run: Run) -> Iterable[str]:
    """Yields a chart of each rank's memory over time, for host and device memory, if known."""
    ranks = _few(sorted(run.intervals))
    colors = dict(zip(ranks, _COLORS.values(), strict=False))
    for field, title in (
        ("rss_mb", "Memory of the processes"),
        ("workers_mb", "Memory of loader workers"),
        ("shm_mb", "Shared memory of the hosts"),
        ("device_mb", "Memory of the devices"),
    ):
        lines = {rank: _curve(_columns(run.intervals[rank]), field) for rank in ranks}
        most = max((mb for line in lines.values() for _, mb in line), default=0.0)
        if most < _SHOWN_MB:
            continue
        height, end = 90, max(s for line in lines.values() for s, _ in line)
        across, up = _WIDTH / end, height / (1.05 * most)
        curves = "".join(
            f'<polyline fill="none" stroke="{colors[rank]}" stroke-width="2" vector-effect="non-scaling-stroke"'
            f' points="{" ".join(f"{s * across:.4g},{height - mb * up:.4g}" for s, mb in line)}">'
            f"<title>rank {rank}, at most {max(mb for _, mb in line):,.0f} MB</title></polyline>"
            for rank, line in lines.items()
            if line
        )
        legend = "".join(
            f'<span><i style="background:{colors[rank]}"></i>rank {rank} {max(mb for _, mb in line):,.0f} MB</span>'
            for rank, line in lines.items()
            if line
        )
        yield (
            f'<h2>{title}</h2><p class="soft">the largest of each interval; the upper edge is {1.05 * most:,.0f} MB</p>'
            f'<p class="legend">{legend}</p><svg viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none"'
            f' style="height:{height}px; background:var(--card)" role="img" aria-label="{title}">{curves}</svg>'
            f'<p class="soft ends"><span>0 s</span><span>{end:.3g} s</span></p>'
        )


def _model_memory(run: Run) -> Iterable[str]:
    """Yields a table of the use of each rank's memory at the end of training."""
    by_rank = {rank: run.intervals[rank][-1].model_mb for rank in _few(sorted(run.intervals)) if run.intervals[rank]}
    kinds = list(dict.fromkeys(kind for parts in by_rank.values() for kind in parts))
    if not kinds:
        return
    head = "".join(f"<th>{for_html(kind)}</th>" for kind in kinds)
    rows = "".join(
        f"<tr><td>{rank}</td>{''.join(f'<td>{parts.get(kind, 0.0):,.4g}</td>' for kind in kinds)}</tr>"
        for rank, parts in by_rank.items()
    )
    yield (
        '<p class="soft" style="margin-top:12px">MB of a model\'s parts, as training ended</p>'
        f'<div class="scroll"><table><tr><th>rank</th>{head}</tr>{rows}</table></div>'
    )


def _curve(intervals: Sequence[Interval], field: str) -> list[tuple[float, float]]:
    """Returns the points of one rank's curve: seconds at the start and at the end of each interval, and megabytes."""
    points, start = [], 0.0
    for interval in intervals:
        end = start + interval.wall_s
        if (mb := getattr(interval, field)) is not None:
            points += [(start, mb), (end, mb)]
        start = end
    return points


def _rect(x: float, y: float, width: float, height: float, fill: str, tip: str) -> str:
    return f'<rect x="{x:g}" y="{y:.4g}" width="{width:.5g}" height="{height:.4g}" {fill}><title>{tip}</title></rect>'


def _columns(intervals: Sequence[Interval]) -> list[Interval]:
    return compact(list(intervals), _MAX_COLUMNS)


def _busy(intervals: Sequence[Interval]) -> list[float]:
    away = ("waiting", *EXPOSED, "checkpoint", "validation")
    return [
        1e3 * (column.wall_s - sum(column.seconds.get(phase, 0.0) for phase in away)) / column.num_steps
        for column in _columns([interval for interval in intervals if interval.num_steps])
    ]


def _table(verdict: Verdict) -> str:
    figures = verdict.figures
    phases = list(figures.mean_shares())
    head = "".join(f"<th>{name(phase)}</th>" for phase in phases)
    rows = "".join(
        f"<tr><td>{rank}</td>{''.join(f'<td>{figures.share(p, rank):.1%}</td>' for p in phases)}</tr>"
        for rank in figures.totals
    )
    return f"<table><tr><th>rank</th>{head}</tr>{rows}</table>"


# --- communication
# The part of the page about communication: the bytes of a step by operation, and the rates of the links.


_COLOR = "#e08a1e"


def _communication(figures: Figures) -> Iterable[str]:
    """Yields a bar of the bytes for each operation, its calls, and the measured rates; nothing if unknown."""
    by_rank = [total.collectives for total in figures.totals.values() if total.collectives]
    if not by_rank:
        return
    names = dict.fromkeys(name for calls in by_rank for name in calls)
    rows = {name: [mean(calls.get(name, {}).get(unit, 0.0) for calls in by_rank) for unit in ("calls", "sent_mb")]
            for name in names}  # fmt: skip
    most = max((mb for _, mb in rows.values()), default=0.0) or 1.0
    yield f'<h2>Communication by operation</h2><p class="soft">{for_html(_about(figures))}</p>'
    for operation, (calls, mb) in sorted(rows.items(), key=lambda row: -row[1][1]):
        bar = f'<rect x="0" y="0" width="{1000 * mb / most:.5g}" height="1" fill="{_COLOR}"/>'
        number = "1 call" if calls == 1 else f"{calls:,.3g} calls"
        yield (
            f'<div class="row operation"><span class="soft">{for_html(operation)}</span><svg viewBox="0 0 1000 1"'
            f' preserveAspectRatio="none" style="height:20px; background:var(--card)" role="img"'
            f' aria-label="{for_html(operation)}">{bar}</svg><span class="soft">{number}, {_size(mb)}</span></div>'
        )
    yield from _links(figures)


def _about(figures: Figures) -> str:
    exposed_s = mean(figures.step_seconds("communication", rank) for rank in figures.totals)
    text = "of a step, mean over the ranks, in the last steps; what a ring has to send. "
    text += f"Collectives that nothing hides take {1e3 * exposed_s:.3g} ms of a step"
    use = link_use(figures)
    rates = [total.all_reduce_mb_per_s for total in figures.totals.values() if total.all_reduce_mb_per_s]
    if use:
        text += f", in which they send {use['used_mb_per_s']:,.3g} MB/s"
    return f"{text}; a large all-reduce sends {mean(rates):,.3g} MB/s." if rates else f"{text}."


def _size(mb: float) -> str:
    """``"1.2 MB"``, ``"12 KB"``."""
    return f"{mb:,.3g} MB" if mb >= 0.1 or not mb else f"{1e3 * mb:,.3g} KB"


def _links(figures: Figures) -> Iterable[str]:
    """Yields a table of the rates between ranks, if they were measured."""
    links_of_ranks = {rank: total.links for rank, total in figures.totals.items() if total.links}
    if not links_of_ranks:
        return
    head = "".join(f"<th>from {rank}</th>" for rank in range(max(map(len, links_of_ranks.values()))))
    rows = "".join(
        f"<tr><td>to rank {rank}</td>{''.join(f'<td>{rate:,.0f}</td>' if rate else '<td></td>' for rate in links)}</tr>"
        for rank, links in sorted(links_of_ranks.items())
    )
    yield (
        '<p class="soft" style="margin-top:12px">MB/s between ranks, as training ended</p>'
        f'<div class="scroll"><table><tr><th></th>{head}</tr>{rows}</table></div>'
    )
