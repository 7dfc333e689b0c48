"""The part of the page about communication: the bytes of a step by operation, and the rates of the links."""

from collections.abc import Iterable
from statistics import mean

from ..foreign import for_html
from .figures import Figures
from .rules.network import link_use

__all__ = ["communication"]

_COLOR = "#e08a1e"


def communication(figures: Figures) -> Iterable[str]:
    """Yields a bar of the bytes for each operation, its calls, and the measured rates; nothing if unknown."""
    by_rank = [total.collectives for total in figures.totals.values() if total.collectives]
    if not by_rank:
        return
    names = dict.fromkeys(name for calls in by_rank for name in calls)
    rows = {name: [mean(calls.get(name, {}).get(unit, 0.0) for calls in by_rank) for unit in ("calls", "sent_mb")]
            for name in names}  # fmt: skip
    most = max((mb for _, mb in rows.values()), default=0.0) or 1.0
    yield f'<h2>Communication by operation</h2><p class="soft">{for_html(_about(figures))}</p>'
    for name, (calls, mb) in sorted(rows.items(), key=lambda row: -row[1][1]):
        bar = f'<rect x="0" y="0" width="{1000 * mb / most:.5g}" height="1" fill="{_COLOR}"/>'
        number = "1 call" if calls == 1 else f"{calls:,.3g} calls"
        yield (
            f'<div class="row operation"><span class="soft">{for_html(name)}</span><svg viewBox="0 0 1000 1"'
            f' preserveAspectRatio="none" style="height:20px; background:var(--card)" role="img"'
            f' aria-label="{for_html(name)}">{bar}</svg><span class="soft">{number}, {_size(mb)}</span></div>'
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
