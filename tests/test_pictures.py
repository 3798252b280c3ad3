"""The pictures of the README: they are those that `make pictures` draws, and show what they claim."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hpcaccel_pictures import FOLDER, RECORDING, pictures
from hpcaccel_pictures.recorder import Recorder
from hpcaccel_pictures.recording import OUTPUT, TYPED, Recording
from hpcaccel_pictures.screen_lines import Line, Run, screen_lines
from hpcaccel_pictures.terminal_picture import shown_times, terminal_picture
from tests.test_readme import README, ROOT

SVG = "{http://www.w3.org/2000/svg}"


def recording(*events: tuple[float, str], **values: int) -> Recording:
    sizes = {"columns": 20, "rows": 5, **values}
    return Recording(**sizes, title="a test", events=tuple((time, OUTPUT, text) for time, text in events))


def lines_at_the_end(played: Recording) -> list[str]:
    """What the terminal shows at the end."""
    last = {line.row: line for line in screen_lines(played, shown_times(played)) if line.end is None}
    shown = []
    for row in range(max(last) + 1):
        text = ""
        for run in last[row].runs if row in last else ():
            text = text.ljust(run.column) + run.text
        shown.append(text)
    return shown


def test_pictures_are_those_that_the_program_draws() -> None:
    drawn = pictures()
    assert set(FOLDER.glob("*.svg")) == set(drawn)
    assert [path.name for path, text in drawn.items() if path.read_text() != text] == [], "run: make pictures"


@pytest.mark.parametrize("name", ["overview.svg", "preemption.svg"])
def test_picture_is_small_and_needs_no_script_and_no_network(name: str) -> None:
    assert f"(docs/pictures/{name})" in (ROOT / README).read_text()
    text = (FOLDER / name).read_text()
    assert len(text.encode()) < 200_000
    elements = {element.tag.removeprefix(SVG) for element in ElementTree.fromstring(text).iter()}
    assert elements <= {"svg", "title", "style", "marker", "g", "rect", "circle", "path", "text"}
    assert not re.search(r"(?:href|src|url)\s*[=(]\s*[\"']?(?!#)", text)


def test_recorded_run_is_preempted_and_loses_no_step() -> None:
    played = Recording.load(RECORDING)
    shown = "\n".join(lines_at_the_end(played))
    stopped = re.search(r"attempt 1 preempted: stopped at step (\d+), saved step_\d+; requeued", shown)
    assert stopped
    assert f"attempt 2 resumed from step {stopped[1]}\n" in shown
    assert "  attempts: 2\n" in shown
    assert "  steps lost: 0\n" in shown
    typed = [text for _, kind, text in played.events if kind == TYPED]
    assert len(typed) == 1
    assert typed[0].startswith("sbatch --partition=urgent ")


def test_recording_has_no_names_of_the_machine() -> None:
    text = RECORDING.read_text()
    assert not re.search(r"/(?:root|home|tmp|work|var)/", text)
    assert set(re.findall(r"/scratch/\w+", text)) == {"/scratch/ada"}


def test_live_display_becomes_states_of_lines() -> None:
    played = recording(
        (0.0, "one\r\n"), (1.0, "\x1b[1mstep 1\x1b[0m"), (1.5, "\r\x1b[2K\x1b[2mstep 2\x1b[0m\n\x1b[?25l")
    )
    assert list(screen_lines(played, [0.0, 1.0, 1.5])) == [
        Line(1, (Run(0, " ", "default", False, True),), 0.0, 1.0),
        Line(1, (Run(0, "step 1", "default", True, False), Run(6, " ", "default", False, True)), 1.0, 1.5),
        Line(0, (Run(0, "one", "default", False, False),), 0.0, None),
        Line(1, (Run(0, "step 2", "brightblack", False, False),), 1.5, None),
    ]


def test_pauses_are_shortened_and_typing_is_not() -> None:
    played = recording((0.0, "$"), (0.1, "a"), (0.2, "b"), (100.2, "done\r\n"), (160.2, "\r\n"))
    assert shown_times(played) == [0.0, 0.1, 0.2, 2.2, 4.2]
    long = recording(*((float(second), f"{second}\r\n") for second in range(100)))
    assert shown_times(long)[-1] == pytest.approx(22)


def test_end_is_shown_without_animation() -> None:
    drawn = ElementTree.fromstring(terminal_picture(recording((0.0, "first"), (1.0, "\r\x1b[2K<last>"))))
    visible = [
        text.text
        for group in drawn.iter(f"{SVG}g")
        if "h" not in group.get("class", "").split()
        for text in group.iter(f"{SVG}text")
    ]
    assert visible == ["<last>"]


def test_commands_are_recorded_with_times_and_without_names(tmp_path: Path) -> None:
    recorder = Recorder(columns=40, rows=5, title="t", folder=tmp_path, environment={"PATH": "/usr/bin:/bin"})
    assert recorder.run("pwd; stty size; exit 3") == 3
    recorder.typed_elsewhere("date")
    recorder.prompt()
    replaced = recorder.recording.with_replaced({str(tmp_path): "/scratch/ada"})
    replaced.save(tmp_path / "one.cast")
    assert Recording.load(tmp_path / "one.cast") == replaced
    shown = "\n".join(lines_at_the_end(replaced))
    assert shown.startswith("$ pwd; stty size; exit 3\n/scratch/ada\n5 40\n$")
    times = [time for time, _, _ in replaced.events]
    assert times == sorted(times)
    assert replaced.events[-2][1:] == (TYPED, "date")


def test_divided_name_is_refused() -> None:
    with pytest.raises(ValueError, match="divided between two events"):
        recording((0.0, "/home/m"), (1.0, "e/x")).with_replaced({"/home/me": "~"})
