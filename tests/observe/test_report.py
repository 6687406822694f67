"""Reports: what the file says, that it stands alone and escapes everything, and what a browser shows of it."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli import main
from draftsmith.errors import UserError
from draftsmith.observe.events import EventLog
from draftsmith.observe.figures import smooth, thin
from draftsmith.observe.history import Curve, previous_run, read_history
from draftsmith.observe.lock import take_lock
from draftsmith.observe.page import escape, script_json
from draftsmith.observe.report import write_report
from draftsmith.observe.status import read_status

EVIL = "<img src=x onerror=document.body.dataset.evil=1></script><b>&\"'"


def make_run(folder: Path, *, best: float = 3.0, steps: int = 300, lr: float = 1e-3, torch: str = "2.11.0") -> Path:
    """A run of two targets and a drafter on two cards, as its log and files would be."""
    folder.mkdir(parents=True)
    os.close(take_lock(folder))
    config = {"target": {"path": EVIL}, "optimizer": {"lr": lr}, "training": {"steps": steps, "output": str(folder)}}
    run = {"fingerprint": "c0ffee", "created": f"2026-01-0{1 + (lr > 1e-3)}T00:00:00+0000", "config": config}
    (folder / "run.json").write_text(json.dumps(run))
    machine = {"torch": torch, "gpus": ["NVIDIA H200"], "driver": "570.1", "environment": {}}
    packages = {"torch": torch, "plotly": "7"}
    environment = {"draftsmith": "0.1.0", "sources": "abc123", "machine": machine, "packages": packages}
    environment["commit"] = {"id": "deadbeef", "changes": ""}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "resolved.json").write_text(json.dumps({"data": {"conversations": 4711, "train": {"rows": 99}}}))
    entry = {"region": "drafter 0", "device": "cuda:1", "direction": "forward", "how": "compiled", "traced": 1.5}
    (folder / "ledger.json").write_text(json.dumps({"entries": [{**entry, "cache": "miss", "reason": ""}]}))
    with EventLog(folder / "events.jsonl") as log:
        log.write("run", step=0, steps=steps, workers=[], cards={"cuda:0": "H200"}, data="da7a", anchors=8)
        log.write("notice", text=EVIL)
        log.write("evidence", step=1, ok=True, text="flex_attention and its backward seen on cuda:1")
        for step in range(1, steps + 1):
            share = step / steps
            for worker in ("prefetch 0", "target 0", "target 1", "drafter 0"):
                log.write("work", worker=worker, row=step, start=1000 + step * 0.1, end=1000.05 + step * 0.1)
            log.write(
                "step", step=step, steps=steps, loss=4 - 2 * share, tau_proxy=1 + (best - 1) * share, lr=lr,
                accept_by_slot=[0.8 * share, 0.5 * share, 0.2 * share], grad_norm=1.0, tokens_per_second=20_000.0,
                data_wait=0.05, blocks=8,
            )  # fmt: skip
            if step % 50 == 0:
                log.write("eval", step=step, loss=4.1 - 2 * share, tau_proxy=best * share)
                log.write("tau", step=step, decode=0.8 * best * share, walk=0.81 * best * share)
                devices = [
                    {"device": name, "use": 0.9, "memory_used": 2**35, "memory_total": 2**37}
                    for name in ("cuda:0", "cuda:1")
                ]
                log.write("vitals", step=step, devices=devices, host={}, queues={}, workers={})
        log.write("checkpoint", step=steps, path=f"{folder}/checkpoints/step-{steps:07d}")
        log.write("end", step=steps, reason="all steps done")
    return folder


class Reader(HTMLParser):
    """Tags, attributes and text of a page; scripts apart."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts, self._inside = "", [""], ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += f" {data}"


def test_the_file_tells_everything_and_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert main(["report", str(run), "--json"]) == 0
    path = Path(json.loads(capsys.readouterr().out)["report"])
    assert path == run / "report.html"
    page = Reader(path.read_text(encoding="utf-8"))
    for text in (
        "Run run", "finished (all steps done)", "healthy", "Compile ledger", "drafter 0", "4711", "conversations",
        "570.1", "deadbeef", "abc123", "c0ffee", "da7a", "2.400", "step-0000300",
        "No earlier run lies beside this one.", "flex_attention and its backward seen on cuda:1", EVIL,
    ):  # fmt: skip
        assert " ".join(text.split()) in " ".join(page.text.split()), text
    names = {tag for tag, _ in page.tags}
    assert "img" not in names
    assert not names & {"link", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        assert not any(name.startswith("on") for name in attributes), tag
        assert (attributes.get("href") or "#").startswith("#")
    policy = next(attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def figures_in(path: Path) -> dict[str, Any]:
    page = Reader(path.read_text(encoding="utf-8"))
    script = next(text for text in page.scripts if text.startswith("[{"))
    return {figure["id"]: figure for figure in json.loads(script)}


def test_the_curves_are_those_of_the_run(tmp_path: Path) -> None:
    figures = figures_in(write_report([make_run(tmp_path / "run")], tmp_path / "r.html"))
    assert set(figures) == {
        "loss", "tau", "slots-0", "lr", "grad_norm", "tokens_per_second", "data_wait", "use", "memory", "timeline-0",
    }  # fmt: skip
    thin_line, _, held_out = figures["loss"]["data"]
    assert thin_line["x"] == list(range(1, 301))
    assert thin_line["y"][-1] == 2.0
    assert held_out["x"] == [50, 100, 150, 200, 250, 300]
    assert [trace["name"] for trace in figures["tau"]["data"]] == [
        "", "training (proxy)", "held-out (proxy)", "decoded", "walk along the target's text".replace("'", "&#x27;"),
    ]  # fmt: skip
    assert figures["tau"]["data"][3]["y"][-1] == pytest.approx(2.4)
    low, high = figures["tau"]["layout"]["yaxis"]["range"]
    assert low < min(figures["tau"]["data"][3]["y"])  # decoding lies under the proxy
    assert high > 3.0
    assert [trace["name"] for trace in figures["slots-0"]["data"]] == ["slot 1", "slot 2", "slot 3"]
    assert figures["memory"]["data"][0]["y"][0] == 32.0
    assert [trace["name"] for trace in figures["use"]["data"]] == ["cuda:0", "cuda:1"]
    bars = {trace["name"]: trace for trace in figures["timeline-0"]["data"]}
    assert list(bars) == ["prefetch 0", "target 0", "target 1", "drafter 0"]
    assert bars["target 1"]["x"] == pytest.approx([0.05] * 125)


def test_comparing_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make_run(tmp_path / "a")
    second = make_run(tmp_path / "b", best=3.6, lr=2e-3, torch="2.13.0")
    assert main(["report", str(first), str(second)]) == 0
    assert f"wrote {first / 'comparison.html'}" in capsys.readouterr().out
    text = " ".join(Reader((first / "comparison.html").read_text()).text.split())
    assert "a against b" in text
    assert "τ decoded, best 2.400 2.880 +20.0% better" in text
    assert "loss, last held-out 2.1000 2.1000 +0.0%" in text
    assert "optimizer.lr 0.001 0.002" in text
    assert "torch 2.11.0 then, 2.13.0 now" in text
    figures = figures_in(first / "comparison.html")
    assert [trace["name"] for trace in figures["loss"]["data"] if trace["name"]] == [
        "a: training", "a: held-out", "b: training", "b: held-out",
    ]  # fmt: skip
    assert {"slots-0", "slots-1", "timeline-0", "timeline-1"} <= figures.keys()
    assert previous_run(second) == first.resolve()
    alone = write_report([second], tmp_path / "b.html").read_text()
    assert "Changed since the run before, a" in Reader(alone).text


def test_runs_are_named_by_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / place) for place in ("a/run", "b/run", "b/other")]
    page = write_report(runs, tmp_path / "r.html")
    text = page.read_text()
    assert "a/run against b/run against other" in Reader(text).text
    assert "<thead><tr><th></th><th>a/run</th><th>b/run</th><th>other</th></tr></thead>" in text
    assert "The configs of a/run and other are equal." in Reader(text).text
    assert {trace["name"] for trace in figures_in(page)["lr"]["data"]} == {"a/run", "b/run", "other"}
    monkeypatch.chdir(runs[0])
    assert main(["report", "."]) == 0
    assert "Run run" in Reader(Path("report.html").read_text()).text


def test_a_folder_whose_name_is_no_utf8(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run").rename(tmp_path / os.fsdecode(b"r\xff"))
    assert main(["report", str(run)]) == 0
    assert "Run r?" in Reader((run / "report.html").read_text()).text


def test_options_that_a_report_cannot_honour_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, trace = make_run(tmp_path / "run"), tmp_path / "t.json"
    assert main(["report", str(run), "--trace", str(trace), "-o", str(tmp_path / "x.html")]) == 2
    assert "--trace names its own file (leave out --output)" in capsys.readouterr().err
    assert not trace.exists()


@pytest.mark.parametrize("option", ["--output", "--trace"])
def test_nothing_is_overwritten_but_a_reports_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    run, data = make_run(tmp_path / "run"), tmp_path / "chat.jsonl"
    data.write_text("mine")
    assert main(["report", str(run), option, str(data)]) == 2
    said = f"draftsmith: {data}: exists already (name another file, or remove it)\n"
    assert capsys.readouterr().err == said
    assert data.read_text() == "mine"
    monkeypatch.chdir(tmp_path)
    for folder in ("/", "", str(run)):
        assert main(["report", str(run), option, folder]) == 2
        assert capsys.readouterr().err == f"draftsmith: {folder or '.'}: is a folder (name a file)\n"
    for _ in range(2):
        assert main(["report", str(run)]) == 0


def test_a_folder_that_may_only_be_read_needs_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, real = make_run(tmp_path / "run"), Path.open

    def read_only(self: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if self.parent == run and mode[0] in "wxa":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(self, mode, *arguments, **named)

    monkeypatch.setattr(Path, "open", read_only)
    assert main(["report", str(run)]) == 2
    message = "cannot be written: Read-only file system (name a file elsewhere with --output)"
    assert message in capsys.readouterr().err
    assert main(["report", str(run), "-o", str(tmp_path / "x.html")]) == 0


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run folder"):
        write_report([tmp_path / "none"], tmp_path / "r.html")
    with EventLog(tmp_path / "empty" / "events.jsonl") as log:
        log.write("plan", lines=[])
    with pytest.raises(UserError, match="no training step"):
        write_report([tmp_path / "empty"], tmp_path / "r.html")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        write_report([make_run(tmp_path / "run")], tmp_path / "file" / "r.html")


def test_steps_that_a_resume_repeats_count_once(tmp_path: Path) -> None:
    curve = Curve()
    for step in (1, 2, 3, 4):
        curve.add(step, {"loss": float(step)})
    for step in (3, 4, 5):
        curve.add(step, {"loss": 10.0 + step})
    assert curve.pairs("loss") == ([1, 2, 3, 4, 5], [1.0, 2.0, 13.0, 14.0, 15.0])
    with EventLog(tmp_path / "run" / "events.jsonl") as log:
        for step in (1, 2, 3, 2):
            log.write("step", step=step, loss=math.nan if step == 1 else float(step))
    assert read_history(tmp_path / "run").train.pairs("loss") == ([2], [2.0])


def test_thinning_keeps_every_spike() -> None:
    values = [math.sin(i / 500) for i in range(100_000)]
    values[54_321] = 50.0
    values[777] = -50.0
    steps, kept = thin(range(100_000), values, 1000)
    assert len(steps) <= 1000
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert steps == sorted(set(steps))
    assert (max(kept), min(kept)) == (50.0, -50.0)
    assert all(values[step] == value for step, value in zip(steps, kept, strict=True))
    assert thin([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])
    assert smooth([2.0] * 100) == pytest.approx([2.0] * 100)


def test_text_cannot_leave_its_place() -> None:
    assert escape("<&>\"'") == "&lt;&amp;&gt;&quot;&#x27;"
    text = script_json(["</script><!--", "a & b"])
    assert not set("<>&") & set(text)
    assert json.loads(text) == ["</script><!--", "a & b"]


# ---------------------------------------------------------------------------------------------------- in a browser

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
needs_browser = pytest.mark.skipif(
    not CHROMIUM, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)

PROBE = """
<script>(function wait() {
  if (!document.body.dataset.drawn) { setTimeout(wait, 50); return; }
  function colour(element, what) { return getComputedStyle(element)[what]; }
  var tick = document.querySelector('#loss .xtick text');
  function texts(place) {
    return Array.from(document.querySelectorAll(place)).map(function (t) { return t.textContent; });
  }
  var out = {
    drawn: document.body.dataset.drawn, evil: document.body.dataset.evil || '',
    paper: colour(document.body, 'backgroundColor'), ink: colour(document.body, 'color'), tick: colour(tick, 'fill'),
    page: document.documentElement.scrollWidth, window: window.innerWidth,
    widths: Array.from(document.querySelectorAll('.main-svg')).map(function (s) { return s.clientWidth; }),
    legend: texts('#tau .legendtext'), workers: texts('#timeline-0 .ytick text'),
    bars: document.querySelectorAll('#timeline-0 .bars .point').length,
    lines: document.querySelectorAll('#loss .scatterlayer .js-line').length,
    requests: performance.getEntriesByType('resource').length,
    images: document.images.length,
  };
  var place = document.createElement('pre'); place.id = 'probe'; place.textContent = JSON.stringify(out);
  document.body.appendChild(place);
})();</script></body>"""


def shown(page: Path, profile: Path, *, width: int = 1280, dark: bool = False) -> dict[str, Any]:
    """What a browser of that width makes of a page."""
    probed = page.with_suffix(".probed.html")
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=20000", "--dump-dom",
        f"--user-data-dir={profile}", f"--window-size={width},900",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]  # fmt: skip
    command = [CHROMIUM, *flags, probed.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="probe">(.*?)</pre>', result.stdout, re.DOTALL)
    assert found, result.stderr[-2000:]
    return json.loads(found.group(1).replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


@needs_browser
def test_in_a_browser_light_dark_and_on_a_phone(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run")], tmp_path / "r.html")
    light = shown(page, tmp_path / "profile")
    dark = shown(page, tmp_path / "profile", dark=True)
    phone = shown(page, tmp_path / "profile", width=500)  # the least that a headless window takes
    for view in (light, dark, phone):
        assert view["drawn"] == "10"
        assert view["evil"] == ""
        assert view["images"] == 0
        assert view["requests"] == 0
        assert view["lines"] == 3
        assert view["bars"] == 500
        assert view["legend"] == [
            "training (proxy)", "held-out (proxy)", "decoded", "walk along the target's text",
        ]  # fmt: skip
        assert sorted(view["workers"]) == ["drafter 0", "prefetch 0", "target 0", "target 1"]
        assert view["tick"] == view["ink"]
        assert view["page"] <= view["window"]  # no sideways scrolling of the page
    assert (light["paper"], light["ink"]) == ("rgb(255, 255, 255)", "rgb(31, 35, 40)")
    assert (dark["paper"], dark["ink"]) == ("rgb(13, 17, 23)", "rgb(230, 237, 243)")
    assert phone["window"] <= 500
    assert all(100 < width <= 500 for width in phone["widths"])


def test_the_balance_of_a_run(tmp_path: Path) -> None:
    """The sentence, each worker's time, and of each device the most volatile moment behind its first."""
    run = make_run(tmp_path / "run")
    with EventLog(run / "events.jsonl") as log:
        for volatility, why in ((0.0, ""), (0.25, "somebody emptied the cache"), (0.02, "new sizes")):
            device = {"device": "cuda:1", "use": 0.5, "reserved": 2**34, "volatility": volatility}
            log.write("vitals", step=301, devices=[{**device, "volatile_because": why}], workers={})
        shares = {"busy": 0.42, "input": 0.37, "output": 0.0, "others": 0.01, "compiling": 0.0, "interpreter": 0.05}
        workers = {"drafter 0": {**shares, "rows": 77, "row_ms": 12.5}}
        log.write("balance", text="targets are 1.6× too slow for 3 drafters", workers=workers, final=True)
    state = read_status(run)
    assert any(line.startswith("balance") and "1.6× too slow" in line for line in state.lines())
    write_report([run], run / "report.html")
    text = " ".join(Reader((run / "report.html").read_text(encoding="utf-8")).text.split())
    assert "targets are 1.6× too slow for 3 drafters" in text
    assert "drafter 0 42.0% 37.0% 0.0% 1.0% 0.0% 5.0% 77 12.5" in text
    assert "16.00 25.0% somebody emptied the cache" in text


@needs_browser
def test_names_that_are_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    evil = tmp_path / "<img src=x onerror=document.body.dataset.evil=1><b>bold"
    view = shown(write_report([make_run(tmp_path / "a"), make_run(evil)], tmp_path / "r.html"), tmp_path / "profile")
    assert view["evil"] == ""
    assert view["images"] == 0
    assert f"{evil.name}: decoded" in view["legend"]
