"""Reports as one HTML file or one picture: what they show, what they mask, and that they load nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpcaccel.cli.main import program
from hpcaccel.core.durable_files import write_json
from hpcaccel.core.records import RunRecord, to_dict
from hpcaccel.view import run_overview
from hpcaccel.view.html_report.charts import ChartLine, Mark, line_chart, ticks
from hpcaccel.view.html_report.comparison_report import differing
from hpcaccel.view.html_report.curves import thinned
from hpcaccel.view.profile_traces import Profile
from hpcaccel.view.usage import GpuUsage, NodeUsage, Usage
from tests.test_recorded import Machine
from tests.view.conftest import HandMade

CHROMIUM = "/usr/bin/chromium"
NAME = "gpt <script>alert(1)</script>"
SECRET = "s3cr3t-value-of-the-spec"


class Parsed(HTMLParser):
    """The elements and the visible text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "style":
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "style":
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text += data

    def titles(self) -> list[str]:
        return [str(attrs["title"]) for _, attrs in self.tags if "title" in attrs]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("HPCACCEL_RUNS_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


def troubled(folder: Path, run_id: str, *, name: str = NAME, lr: float = 0.1) -> HandMade:
    """A run that was preempted at step 40 and failed at step 80, with a secret in its spec and in its log."""
    made = HandMade(folder / "runs" / "gpt" / run_id, name=name)
    record = RunRecord(
        run_id=run_id, name=name, backend="local", cluster="local", job_ids=["local-1"], created=1000.0,
        packages={"torch": "2.13.0"}, git_commit="abc123",
    )  # fmt: skip
    write_json(made.run.record, to_dict(record))
    env = {"WANDB_API_KEY": SECRET, "NCCL_DEBUG": "WARN"}
    spec = {"name": name, "entrypoint": {"args": {"lr": lr}}, "environment": {"env": env, "secrets": ["OTHER"]}}
    write_json(made.run.spec, {"version": 1, "spec": spec})
    made.run.spec_yaml.write_text(json.dumps(spec))
    made.run.script.write_text("#!/bin/bash\nexec node.pyz batch\n")
    made.start(1)
    made.progress(1, total_steps=100)
    for step in range(1, 41):
        made.metric(step, attempt=1, time=1000.0 + step, loss=4.0 - step / 20)
    made.end(1, reason="preempted", decision="requeue", last_step=40, time=1100.0, seconds=100.0)
    made.start(2)
    made.progress(2, resumed_step=30, total_steps=100)
    for step in range(31, 81):
        made.metric(step, attempt=2, time=2000.0 + step, loss=4.0 - step / 20)
    made.log(
        2, 1, f"Traceback (most recent call last):\n  <b>train.py</b>\nValueError: {SECRET} Xother-secretX\n".encode()
    )
    made.end(2, reason="failed", decision="end", error_class="user_error", last_step=80, time=2100.0, seconds=90.0)
    return made


def report(*words: str) -> Result:
    return CliRunner().invoke(program(), ["report", *words])


def written(*words: str) -> Parsed:
    result = report(*words, "--html", "out.html")
    assert result.exit_code == 0, result.output
    assert result.output == f"{Path('out.html').absolute()}\n"
    return Parsed(Path("out.html"))


def assert_self_contained(page: Parsed) -> None:
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    for tag, attrs in page.tags:
        assert not {"src", "href", "xlink:href", "srcset", "action"} & attrs.keys(), tag
        assert not any(name.startswith("on") for name in attrs), tag
    policy = [attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    source = Path("out.html").read_text()
    assert "url(" not in source
    assert "@import" not in source


def test_report_of_a_run_has_all_parts_and_loads_nothing(tmp_path: Path) -> None:
    page = written(str(troubled(tmp_path, "20261120-153012-4f2a").run.path))

    assert_self_contained(page)
    parts = ("What failed", "The life of the run", "Loss", "Throughput", "Where the time went", "Attempts", "Ranks")
    for title in (*parts, "Spec", "Batch script", "Environment", "1 Python packages"):
        assert title in page.text, title
    assert "80/100" in page.text
    assert "torch==2.13.0" in page.text
    assert "abc123" in page.text
    assert any("attempt 2 continues from step 30" in text for text in page.text.splitlines())


def test_samples_and_profiles_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = troubled(tmp_path, "20261120-153012-4f2a")
    profile = Profile(
        name="2/trace.json.gz", attempt=2, rank=1, state="done", first_step=41, last_step=45,
        path="/runs/trace.json.gz", bytes=3_100_000, time=1.0, detail="",
    )  # fmt: skip
    node = NodeUsage(
        node="n1", seconds=60.0, source="cgroup2", cpu_share=0.25, cpus=8, memory_peak_bytes=6_000_000_000,
        memory_limit_bytes=100_000_000_000, io_read_bytes=None, io_write_bytes=None,
    )  # fmt: skip
    gpu = GpuUsage(
        node="n1", uuid="GPU-1234", name="H100", mig=False, seconds=60.0, mean_utilization=87.0, memory_peak_bytes=None,
        memory_total_bytes=None, idle_seconds=3600.0, idle_now=True, idle_since_step=20, energy_kwh=1.5, rank=3,
    )  # fmt: skip
    used = Usage(nodes=[node], gpus=[gpu], idle_gpu_hours=1.0, energy_kwh=1.5)
    real = run_overview.overview
    hints = ["used 6 of 100 GB: ask for 10G"]
    monkeypatch.setattr(
        run_overview, "overview", lambda *args, **more: replace(real(*args, **more), usage=used, hints=hints)
    )
    monkeypatch.setattr("hpcaccel.view.html_report.record_sections.profiles", lambda run: [profile])
    text = written(str(made.run.path)).text
    for shown in ("used 6 of 100 GB: ask for 10G", "25.0 %", "6.0 GB", "100.0 GB", "GPU-1234", "87 %", "since step 20"):
        assert shown in text, shown
    for shown in ("1.5 kWh", "1 GPU-hours idle", "41 to 45", "/runs/trace.json.gz"):
        assert shown in text, shown


def test_names_and_logs_are_escaped(tmp_path: Path) -> None:
    page = written(str(troubled(tmp_path, "20261120-153012-4f2a").run.path))
    assert NAME in page.text
    assert "<b>train.py</b>" in page.text


def test_secrets_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "Xother-secretX")
    written(str(troubled(tmp_path, "20261120-153012-4f2a").run.path))
    source = Path("out.html").read_text()
    assert SECRET not in source
    assert "Xother-secretX" not in source
    assert "ValueError: *** ***" in source
    assert "WARN" in source


def test_blocks_of_the_life_bar_fill_it_without_overlaps(tmp_path: Path) -> None:
    page = written(str(troubled(tmp_path, "20261120-153012-4f2a").run.path))
    places = [attrs["style"] for tag, attrs in page.tags if tag == "i" and "title" in attrs]
    blocks = [[float(part.split(":")[1].strip("%")) for part in str(style).split(";")] for style in places]
    assert blocks
    bars = 0
    at = 0.0
    for left, width in blocks:
        if left == 0:
            bars, at = bars + 1, 0.0
        assert left == pytest.approx(at, abs=0.01)
        at = left + width
        assert at <= 100.01
    assert bars == 2, "the life, and where the time went"
    assert any(title.startswith("training for") for title in page.titles())


def test_comparison_shows_curves_together_and_only_fields_that_differ(tmp_path: Path) -> None:
    one = troubled(tmp_path, "20261120-153012-4f2a")
    other = troubled(tmp_path, "20261120-153013-4f2b", name="other", lr=0.2)
    page = written(str(one.run.path), str(other.run.path))

    assert_self_contained(page)
    assert "Comparison of runs" in page.text
    assert "entrypoint.args.lr" in page.text
    assert "NCCL_DEBUG" not in page.text
    lines = [attrs for tag, attrs in page.tags if tag == "path" and str(attrs.get("class")).startswith("line ")]
    assert {attrs["class"] for attrs in lines} == {"line c1", "line c2"}


def test_differing_fields_of_specs() -> None:
    assert differing([{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 1, "c": [1]}]) == [
        ("b", ["x", "y", "–"]),
        ("c", ["–", "–", "[1]"]),
    ]


def test_report_of_a_sweep(tmp_path: Path) -> None:
    sweep = next((Machine(tmp_path / "recorded").folder / "work" / "runs" / "tuned").iterdir())
    page = written(str(sweep))
    assert_self_contained(page)
    for title in (
        "Best value so far",
        "Learning curves",
        "Best parameters, trial 0",
        "Trials",
        "Best spec",
        "Sweep file",
    ):
        assert title in page.text, title
    assert "0.23085486404222497" in page.text


def test_sweep_is_not_compared_with_a_run(tmp_path: Path) -> None:
    sweep = next((Machine(tmp_path / "recorded").folder / "work" / "runs" / "tuned").iterdir())
    result = report(str(sweep), str(troubled(tmp_path, "20261120-153012-4f2a").run.path), "--html", "out.html")
    assert result.exit_code == 2
    assert "is a sweep, which cannot be compared with other runs" in result.output
    assert not Path("out.html").exists()


def test_picture_of_one_run_and_of_two(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = troubled(tmp_path, "20261120-153012-4f2a", name="costs $5 and $6")
    other = troubled(tmp_path, "20261120-153013-4f2b", name="other")
    for runs in ([one], [one, other]):
        result = report(*(str(made.run.path) for made in runs), "--png", "out.png")
        assert result.exit_code == 0, result.output
        assert Path("out.png").read_bytes().startswith(b"\x89PNG")


def test_run_without_metrics_has_a_page_but_no_picture(hand_made: HandMade) -> None:
    pytest.importorskip("matplotlib")
    assert "Environment" in written(str(hand_made.run.path)).text
    result = report(str(hand_made.run.path), "--png", "out.png")
    assert result.exit_code == 2
    assert "no metric has been logged yet" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--html", "report.txt"], "--html 'report.txt' does not end in .html or .htm"),
        (["--png", "report.html"], "--png 'report.html' does not end in .png"),
        (["--html", "none/report.html"], "none does not exist: create it, or choose another --html"),
        (["--html", "report.html", "--json"], "--json cannot be combined with --html or --png"),
    ],
)
def test_wrong_file_names_are_refused(hand_made: HandMade, words: list[str], message: str) -> None:
    result = report(str(hand_made.run.path), *words)
    assert result.exit_code == 2
    assert message in result.output


def test_time_reports_of_several_runs_as_json(tmp_path: Path) -> None:
    one = troubled(tmp_path, "20261120-153012-4f2a")
    other = troubled(tmp_path, "20261120-153013-4f2b")
    both = json.loads(report(str(one.run.path), str(other.run.path), "--json").output)
    assert [plain["run_id"] for plain in both] == ["20261120-153012-4f2a", "20261120-153013-4f2b"]
    assert json.loads(report(str(one.run.path), "--json").output)["run_id"] == "20261120-153012-4f2a"


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.013, 0.047, 4) == [0.02, 0.03, 0.04]
    assert ticks(3, 3) == [3]


def test_chart_leaves_out_values_that_are_not_finite() -> None:
    nothing = line_chart([ChartLine(points=[(1, float("nan"))])], x_title="step", y_title="loss")
    assert nothing == ""
    chart = line_chart(
        [ChartLine(points=[(1, 1.0), (2, float("inf")), (3, 2.0)])], x_title="step", y_title="<loss>",
        marks=[Mark(x=2, text="<i>"), Mark(x=9, text="outside")],
    )  # fmt: skip
    assert "inf" not in chart
    assert "nan" not in chart
    assert "<title>&lt;i&gt;</title>" in chart
    assert "&lt;loss&gt;" in chart
    assert "outside" not in chart


def test_long_curve_is_thinned_to_means_with_a_band() -> None:
    curve = thinned([(step, float(step % 2)) for step in range(1000)], most=100)
    assert len(curve.points) == 100
    assert {value for _, value in curve.points} == {0.5}
    assert all((low, high) == (0.0, 1.0) for _, low, high in curve.band)


@pytest.mark.chaos
def test_report_opens_offline_in_chromium_and_requests_nothing_else(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"{CHROMIUM} is not installed")
    written(str(troubled(tmp_path, "20261120-153012-4f2a").run.path))
    requests: list[str] = []
    alarms: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme, width in (("light", 1200), ("dark", 390)):
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}, offline=True)
            page = context.new_page()
            page.on("request", lambda request: requests.append(request.url))
            page.on("dialog", lambda dialog: alarms.append(dialog.message))
            page.on("console", lambda message: alarms.append(message.text))
            page.goto(Path("out.html").absolute().as_uri())
            assert page.locator("h1").inner_text() == NAME
            assert page.evaluate("document.documentElement.scrollWidth") == width, "nothing is wider than the screen"
            assert page.locator("svg").first.bounding_box()["height"] > 100
        browser.close()
    assert requests == [Path("out.html").absolute().as_uri()] * 2
    assert alarms == []
