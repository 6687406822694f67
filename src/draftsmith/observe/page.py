"""The HTML around a report: one file, no network, every text escaped, light and dark, wide and narrow.

The page forbids itself all connections (Content-Security-Policy), so a text that smuggled markup in could still not
reach anybody. Figures are data in a script element, drawn by plotly's own code, which the file carries (about 5 MB).
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

Cell = Any
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --panel: #f6f8fa; --ink: #1f2328; --faint: #59636e;
  --rule: #d1d9e0; --good: #1a7f37; --bad: #cf222e; --link: #0969da }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --panel: #161b22; --ink: #e6edf3; --faint: #9198a1;
  --rule: #3d444d; --good: #3fb950; --bad: #f85149; --link: #4493f8 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1240px; margin: 0 auto; padding: 16px }
h1 { font-size: 1.5rem; margin: .2em 0; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 2em 0 .6em; padding-bottom: .2em; border-bottom: 1px solid var(--rule) }
h3 { font-size: 1rem; margin: 0 }
nav a { margin-right: 1em; white-space: nowrap; color: var(--link) }
p, figcaption { color: var(--faint); margin: .3em 0 }
.figures { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)) }
figure { margin: 0; min-width: 0; padding: 12px; border: 1px solid var(--rule); border-radius: 8px;
  background: var(--panel) }
.wide { grid-column: 1 / -1 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--rule) }
th { color: var(--faint); font-weight: 600 }
td { overflow-wrap: break-word }
pre { margin: 0; padding: 12px; overflow-x: auto; border: 1px solid var(--rule); border-radius: 8px;
  background: var(--panel); font-size: 13px }
.good { color: var(--good) } .bad { color: var(--bad) }
details summary { cursor: pointer; color: var(--link) }
"""

SCRIPT = """
(function () {
  var figures = JSON.parse(document.getElementById('figures').textContent);
  var dark = window.matchMedia('(prefers-color-scheme: dark)');
  function colours() {
    var style = getComputedStyle(document.documentElement);
    function read(name) { return style.getPropertyValue(name).trim(); }
    var change = { 'font.color': read('--ink'), 'hoverlabel.bgcolor': read('--paper') };
    ['xaxis', 'yaxis'].forEach(function (axis) {
      change[axis + '.gridcolor'] = read('--rule');
      change[axis + '.linecolor'] = read('--rule');
      change[axis + '.zerolinecolor'] = read('--rule');
    });
    return change;
  }
  var drawn = figures.map(function (figure) {
    var place = document.getElementById(figure.id);
    return Plotly.newPlot(place, figure.data, figure.layout, { responsive: true, displaylogo: false,
      displayModeBar: false }).then(function () { return Plotly.relayout(place, colours()); });
  });
  Promise.all(drawn).then(function () { document.body.setAttribute('data-drawn', String(drawn.length)); });
  dark.addEventListener('change', function () {
    figures.forEach(function (figure) { Plotly.relayout(document.getElementById(figure.id), colours()); });
  });
})();
"""


def page(title: str, sections: Iterable[tuple[str, str, str]], figures: Sequence[tuple[str, Any]]) -> str:
    """The whole file.

    Args:
        title: plain text.
        sections: (identifier, plain title, HTML made by the functions below); empty ones are left out.
        figures: (identifier of its element, plotly figure).
    """
    from plotly.offline import get_plotlyjs

    kept = [section for section in sections if section[2]]
    links = " ".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading, _ in kept)
    body = "".join(f'<section id="{name}"><h2>{escape(heading)}</h2>{text}</section>' for name, heading, text in kept)
    data = [{"id": name, **figure.to_plotly_json()} for name, figure in figures]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{escape(title)}</h1><nav>{links}</nav>{body}"
        "<noscript><p>The curves need JavaScript; everything else is here.</p></noscript></main>"
        f'<script type="application/json" id="figures">{script_json(data)}</script>'
        f"<script>{get_plotlyjs()}</script><script>{SCRIPT}</script></body></html>\n"
    )


def escape(value: Cell) -> str:
    """Any value as text that is safe between tags and in attributes."""
    return html.escape(str(value), quote=True)


def script_json(content: Any) -> str:
    """JSON that cannot end the script element that holds it."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def table(rows: Iterable[Sequence[Cell]], head: Sequence[str] = ()) -> str:
    """A table that scrolls by itself where it is too wide; empty without rows."""
    found = list(rows)
    if not found:
        return ""
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    lines = "".join(
        "<tr>" + f"<th>{escape(row[0])}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in found
    )
    return f'<div class="scroll"><table>{top}<tbody>{lines}</tbody></table></div>'


def paragraph(text: str, kind: str = "") -> str:
    """One line of text; `kind` is "good", "bad" or nothing."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def folded(label: str, text: str) -> str:
    """Preformatted text that opens on a click."""
    return f"<details><summary>{escape(label)}</summary><pre>{escape(text)}</pre></details>"


def drawing(name: str, title: str, caption: str, *, wide: bool = False) -> str:
    """The place of a figure."""
    kind = ' class="wide"' if wide else ""
    return (
        f'<figure{kind}><h3>{escape(title)}</h3><div id="{name}"></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
