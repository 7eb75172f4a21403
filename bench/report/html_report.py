# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Results as one page, report.html: machine and versions, plots, and tables that a click on a header sorts.

    python -m bench.report.html_report RESULT.json... [--out FILE]     makes it of kept results

The page holds all that it needs, plotly.js too: it opens from a disk without a network.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require("torch", "tabulate", "tqdm")  # and plotly, but only to write

import argparse
import html
import importlib.util
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import remedy
from bench.measure.provenance import PACKAGE, parts_of_other_commits
from bench.measure.shapes import Record, Result, kind_of, level_of, shape_text
from bench.providers.ours import LEVELLED, OURS
from bench.report import compare, tables
from bench.report.compare import spread_of
from bench.report.styles import style_of
from bench.report.text import figure_text, read_result
from tilegym_rmsnorm.commands import options

Results = dict[str, Result]  # by what tells them apart on the page
Cells = dict[str, tuple[str, Any]]  # by column: what is shown, and by what it is sorted
NAME = "report.html"
TEMPLATE = Path(__file__).with_name("html_report.html")
LINE = 24  # pixels of a shape in a plot


def why_none() -> str | None:
    """Why no report can be made here."""
    if importlib.util.find_spec("plotly") is not None:
        return None
    return f"plotly is not installed. To install it: {remedy()}"


def write(results: Sequence[Result], path: Path) -> None:
    """The page of these results; each must have records."""
    from plotly.offline import get_plotlyjs

    gpus = dict.fromkeys(each["gpu"] or "no GPU" for each in results)
    named = _labelled(results)
    parts = {
        "TITLE": _text(f"RMSNorm benchmark: {', '.join(gpus)}"),
        "MACHINE": _machine(named),
        "NOTES": _notes(named),
        "SUMMARY": _summary(named),
        "PLOTS": "\n".join(_plots(named)),
        "RATIOS": _ratio_table(named),
        "MEASUREMENTS": _table("measurements", [_measurement(*each) for each in _records(named)]),
        "REMARKS": _remarks(named),
        "PLOTLY": get_plotlyjs(),
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    for name, text in parts.items():  # plotly.js last: it may hold what looks like a name
        page = page.replace(f"<!-- {name} -->", text)
    path.write_text(page, encoding="utf-8")


def _machine(results: Results) -> str:
    """A table of what is known of the machine and its versions. Where results differ each value says of which it is."""
    found: dict[str, dict[str, list[str]]] = {"measured": {"; ".join(results): []}}
    for label, result in results.items():
        for name, value in _facts(result).items():
            found.setdefault(name, {}).setdefault(value, []).append(label)
    rows = []
    for name, values in found.items():
        is_same = len(values) == 1
        lines = [value if is_same else f"{value} ({'; '.join(labels)})" for value, labels in values.items()]
        rows.append(f"<tr><th>{_text(name)}</th><td>{'<br>'.join(map(_text, lines))}</td></tr>")
    return f'<table class="machine">{"".join(rows)}</table>'


def _facts(result: Result) -> dict[str, str]:
    commit = result["commit"][:12] + (" with local changes" if result["dirty"] else "")
    commit = ", ".join([commit, *parts_of_other_commits(result)])
    copy = result["copy_gb_per_s"]
    facts = {
        "GPU": result["gpu"] or "none",
        "driver": result["driver"],
        "CUDA": result["cuda"],
        "tileiras": result["tileiras"],
        **{name: version for name, version in result["versions"].items() if name != PACKAGE},
        f"{PACKAGE} at commit": commit,
        "teams": None if result.get("teams", True) else "off",
        "level of reproducibility": None if level_of(result) == "run" else level_of(result),
        "the user's tables": result.get("user_tables"),
        "device copy": None if copy is None else f"{copy:.0f} GB/s",
        "date": result["date"][:10],
    }
    return {name: value for name, value in facts.items() if value}


def _comparisons(result: Result, op: str) -> list[compare.Comparison]:
    """Return [] without a GPU: the times of interpreters say nothing about kernels."""
    return [] if result["gpu"] is None else compare.compare(result, op)


def _notes(results: Results) -> str:
    """Say, before any figure, what these are not."""
    notes = dict.fromkeys(result["note"] for result in results.values() if result["note"])
    return "".join(f"<p><strong>{_text(note)}</strong></p>" for note in notes)


def _summary(results: Results) -> str:
    """A line for each op and dtype: the mean ratio to the best peer, and how often that is at least 1."""
    rows = []
    for label, result in results.items():
        for op in tables.ops_of(result):
            comparisons = _comparisons(result, op)
            mean = compare.mean_ratio(comparisons)
            if mean is not None:
                won = sum(each.ratio >= 1.0 for each in comparisons)
                cells = (f"{op}, {label}", f"{mean:.2f}", f"{won} of {len(comparisons)}")
                rows.append("".join(f"<td>{_text(cell)}</td>" for cell in cells))
    if not rows:
        return ""
    head = "<th></th><th>cutile / best peer, geometric mean</th><th>as fast or faster</th>"
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _remarks(results: Results) -> str:
    """List failures and what was not measured, once each."""
    lines: dict[str, None] = {}
    for label, result in results.items():
        lines |= dict.fromkeys(f"failed, {label}: {line}" for line in tables.failures(result))
        unavailable = result["unavailable"].items()
        lines |= dict.fromkeys(f"not measured: {name}: {reason}" for name, reason in unavailable)
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>" if lines else ""


def _plots(results: Results) -> Iterable[str]:
    for label, result in results.items():
        for op in tables.ops_of(result):
            of_op = (each for each in result["records"] if each["op"] == op)
            records = [
                each for each in of_op if each["gb_per_s"] is not None and each["provider"] not in LEVELLED
            ]
            if not records:
                continue
            plots = [_rates(result, records)]
            if comparisons := _comparisons(result, op):
                plots.append(_ratios(comparisons))
            # Known before its plots are drawn, as the page is read: what CSS finds out by counting is not.
            pair = "pair" if len(plots) == 2 else "plot"
            yield f'<h3>{_text(f"{op}, {label}")}</h3>\n<div class="{pair}">{"".join(map(_drawn, plots))}</div>'


def _rates(result: Result, records: list[Record]) -> dict[str, Any]:
    """A bar for this package at each shape, a marker for everybody, a line for the copy."""
    traces: list[dict[str, Any]] = []
    for provider in dict.fromkeys(each["provider"] for each in records):
        own = [each for each in records if each["provider"] == provider]
        color, _, symbol = style_of(provider)
        # plotly takes text for HTML.
        hover = [f"{_text(compare.name_of(each))}: {compare.rate_text(each)} GB/s" for each in own]
        common = {"x": [each["gb_per_s"] for each in own], "y": [shape_text(each) for each in own]}
        common |= {"name": _text(provider), "hovertext": hover, "hoverinfo": "y+text"}
        if provider == OURS:
            bar = {"type": "bar", "orientation": "h", "marker": {"color": color, "opacity": 0.35}}
            traces.insert(0, common | bar)
            continue
        # What is thin has an outline alone.
        line = {"color": color, "width": 2} if "thin" in symbol else {"color": "black", "width": 0.5}
        marker = {"color": color, "symbol": symbol, "size": 8, "line": line}
        traces.append(common | {"type": "scatter", "mode": "markers", "marker": marker})
    figure = _plot(traces, records, "GB/s of compulsory bytes")
    if result["copy_gb_per_s"] is not None:
        _add_line(figure, result["copy_gb_per_s"], "device copy")
    _add_legend(figure)
    return figure


def _ratios(comparisons: list[compare.Comparison]) -> dict[str, Any]:
    """Plot speeds relative to the best peer at each shape."""
    own = style_of(OURS).color
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [each.ratio for each in comparisons],
        "y": [shape_text(each.ours) for each in comparisons],
        "text": [f"{each.ratio:.2f}" for each in comparisons],
        "insidetextanchor": "start",
        "hovertext": [f"against {_text(compare.name_of(each.peer))}" for each in comparisons],
        "hoverinfo": "y+text+x",
        "marker": {"color": [own if each.ratio >= 1 else "#777" for each in comparisons]},
    }
    figure = _plot([trace], [each.ours for each in comparisons], "cutile / best peer, above 1 is faster")
    _add_line(figure, 1.0, "")
    return figure


def _plot(traces: list[dict[str, Any]], records: list[Record], title: str) -> dict[str, Any]:
    shapes = list(dict.fromkeys(shape_text(each) for each in records))
    ends = [len(shapes) - 0.5, -0.5]  # downwards
    layout = {
        "height": LINE * len(shapes) + 70,
        "margin": {"l": 8, "r": 12, "t": 16, "b": 44},
        "xaxis": {"title": {"text": title}, "rangemode": "tozero", "gridcolor": "#ddd", "automargin": True},
        "yaxis": {"type": "category", "categoryarray": shapes, "range": ends, "automargin": True},
        "showlegend": False,
        "dragmode": False,  # a finger on a plot scrolls the page
        "bargap": 0.3,
        "plot_bgcolor": "white",
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "shapes": [],
        "annotations": [],
    }
    return {"data": traces, "layout": layout}


def _add_line(figure: dict[str, Any], x: float, text: str) -> None:
    line = {"color": "black", "dash": "dash", "width": 1}
    ends = {"x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
    figure["layout"]["shapes"].append({"type": "line", "line": line, **ends})
    if text:  # in the legend, where it covers nothing
        nowhere = {"type": "scatter", "mode": "lines", "x": [None], "y": [None]}
        figure["data"].append(nowhere | {"line": line, "name": text, "hoverinfo": "skip"})


def _add_legend(figure: dict[str, Any]) -> None:
    """Also of one provider, which plotly leaves out by default."""
    layout = figure["layout"]
    layout["showlegend"] = True
    layout["legend"] = {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0}
    layout["height"] += 20 * math.ceil(len(figure["data"]) / 2)  # two names a line on a phone


def _drawn(figure: dict[str, Any]) -> str:
    from plotly.io import to_html

    config = {"responsive": True, "displayModeBar": False}
    plain = {"include_plotlyjs": False, "full_html": False, "validate": False}
    return to_html(figure, config, default_height=f"{figure['layout']['height']}px", **plain)


def _ratio_table(results: Results) -> str:
    """cutile against the best peer, where both were measured."""
    rows = [
        _ratio(label, op, each)
        for label, result in results.items()
        for op in tables.ops_of(result)
        for each in _comparisons(result, op)
    ]
    if not rows:
        return "<p>No ratio: at no shape were both cutile and a peer measured on a GPU.</p>"
    text = 'Above 1, "cutile / best peer" means that cutile is faster. A click on a header sorts.'
    return f"<p>{text}</p>\n{_table('ratios', rows)}"


def _ratio(label: str, op: str, comparison: compare.Comparison) -> Cells:
    ours, peer, ratio = comparison
    return _place(label, op, ours) | {
        "cutile / best peer": (f"{ratio:.2f}", ratio),
        "best peer": _word(compare.name_of(peer)),
        "cutile / copy": _figure(ours["copy_fraction"], ".0%"),
        "cutile GB/s": _rate(ours),
        "best peer GB/s": _rate(peer),
    }


def _records(results: Results) -> Iterable[tuple[str, str, Record]]:
    """Every record with the label of its result and its op."""
    for label, result in results.items():
        for op in tables.ops_of(result):
            yield from ((label, op, each) for each in result["records"] if each["op"] == op)


def _measurement(label: str, op: str, record: Record) -> Cells:
    us = record["us"]
    spread = None if us is None else spread_of(record)
    return _place(label, op, record) | {
        "provider": _word(record["provider"]),
        "us (median)": ("failed", "") if us is None else _figure(us, ".1f"),
        "spread": ("", "") if spread is None else (f"±{spread:.0%}", spread),
        "GB/s": _rate(record),
        "share of copy": _figure(record["copy_fraction"], ".0%"),
        "host us": _figure(record["host_us"], ".0f"),
        "level / run": _figure(record.get("level_ratio"), ".2f"),
    }


def _place(label: str, op: str, record: Record) -> Cells:
    rows, cols = record["rows"], record["cols"]
    return {"dtype": _word(label), "op": _word(op), "rows": (str(rows), rows), "columns": (str(cols), cols)}


def _word(text: str) -> tuple[str, str]:
    return text, text


def _figure(value: float | None, form: str) -> tuple[str, Any]:
    return figure_text(value, form), "" if value is None else value


def _rate(record: Record) -> tuple[str, Any]:
    return ("", "") if record["us"] is None else (compare.rate_text(record), record["gb_per_s"])


def _table(name: str, rows: list[Cells]) -> str:
    """A table that is sorted by its headers, without the columns in which nothing stands."""
    columns = [column for column in rows[0] if any(row[column][0] for row in rows)]
    numbers = {column for column in columns if any(isinstance(row[column][1], int | float) for row in rows)}
    classes = {column: ' class="number"' if column in numbers else "" for column in columns}
    heads = (f'<th{classes[each]}><button type="button">{_text(each)}</button></th>' for each in columns)
    lines = ("".join(_cell(*row[each], classes[each]) for each in columns) for row in rows)
    head, body = "".join(heads), "\n".join(f"<tr>{line}</tr>" for line in lines)
    table = f'<table class="sortable" id="{name}"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _cell(shown: str, value: Any, class_: str) -> str:
    """Add the value to sort by, where another is shown."""
    data = "" if str(value) == shown else f' data-value="{_text(str(value))}"'
    return f"<td{class_}{data}>{_text(shown)}</td>"


def _labelled(results: Sequence[Result]) -> Results:
    """Each with a name that no other has: the dtype, and what else it takes."""
    has_many = len({result["gpu"] for result in results}) > 1
    labelled: Results = {}
    for result in results:
        parts = [result["records"][0]["dtype"]]
        parts += [kind_of(result)] if kind_of(result) != "models" else []
        parts += [result["gpu"] or "no GPU"] if has_many else []
        name = ", ".join(parts)
        if name in labelled:
            name += f", {result['date']}"
        labelled[name] = result
    return labelled


def _text(text: str) -> str:
    return html.escape(text)


def main(argv: list[str] | None = None) -> None:
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m bench.report.html_report", description=about)
    parser.add_argument("result", type=read_result, nargs="+", metavar="RESULT.json")
    parser.add_argument("--out", type=options.path, default=Path(NAME), help=f"default: {NAME}")
    arguments = parser.parse_args(argv)
    if reason := why_none():
        sys.exit(reason)
    write(arguments.result, arguments.out)
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
