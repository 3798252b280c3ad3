"""README.md: its commands are run, their output is compared, its files are used.

So are those of the pages that continue it: docs/spec-file.md, docs/runs.md and docs/functions.md.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = "README.md"

NOT_RUN_HERE = {
    "pip install '.[train]'": "tests/test_wheel.py installs the package",
    "make demo": "a test of its own",
}


def blocks(language: str, page: str = README) -> list[str]:
    """The blocks of code of a page that are in this language."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def script(sign: str) -> str:
    """The training script of the diff: before (``-``) or after (``+``)."""
    [diff] = blocks("diff")
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in (" ", sign, "\n"))


def shown_commands(page: str = README) -> list[tuple[str, str]]:
    """Each command of a console block with the output that the page shows."""
    found = []
    for block in blocks("console", page):
        if block.startswith("$ make demo\n"):
            found.append(("make demo", block.partition("\n")[2]))  # its output contains commands
            continue
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


VARYING = {
    r"\d{8}-\d{6}-[0-9a-f]{4}": r"\d{8}-\d{6}-[0-9a-f]{4}",  # a run's id
    r"local-[0-9a-f]{8}": r"local-[0-9a-f]{8}",
    r"step_\d{8}": r"step_\d{8}",
    r"(?:\d+[hms] )+": r"(?:\d+[hms] )+",  # a duration
    r"(?<![\w,])\d[\d.:k-]*": r"[\d.:k-]+",
    "…": r"\S*",
}


def pattern(shown: str) -> str:
    """What the README shows, as a pattern: ids, numbers and paths differ, a lone ``…`` stands for any lines."""
    lines = []
    for line in shown.splitlines():
        if line.strip() == "…":
            lines.append(r"(?:.*\n)*?")
            continue
        parts = re.split(f"({'|'.join(VARYING)})", " ".join(line.split()))
        lines.append("".join(_part(part) for part in parts) + r"\n")
    return "".join(lines)


def _part(text: str) -> str:
    found = (regex for varying, regex in VARYING.items() if re.fullmatch(varying, text))
    return next(found, re.escape(text))


def assert_shown(output: str, shown: str) -> None:
    folded = "".join(" ".join(line.split()) + "\n" for line in output.splitlines())
    assert re.fullmatch(pattern(shown), folded), f"the README shows\n{shown}\nbut it printed\n{output}"


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    env.pop("HPCACCEL_RUNS_DIR", None)
    if command[0] == sys.executable and "demo.py" in command[1]:
        env["HPCACCEL_RUNS_DIR"] = str(folder / "runs")
    # the live display and errors go to stderr; a terminal shows both
    return subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(script("+"))
    (tmp_path / "job.yaml").write_text(blocks("yaml")[0])
    return tmp_path


def test_training_script_runs_before_and_after_the_diff(folder: Path) -> None:
    for sign in "-+":
        (folder / "alone.py").write_text(script(sign))
        answer = run([sys.executable, "alone.py"], folder)
        assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize(("page", "count"), [(README, 3), ("docs/spec-file.md", 3)])
def test_commands_print_what_the_page_shows(folder: Path, page: str, count: int) -> None:
    ran = []
    for command, shown in shown_commands(page):
        if command in NOT_RUN_HERE:
            continue
        answer = run(shlex.split(command), folder)
        assert_shown(answer.stdout, shown)
        ran.append(command)
    assert len(ran) == count


def test_commands_about_a_run_print_what_the_page_shows(folder: Path) -> None:
    submitted = run(["hpcaccel", "submit", "job.yaml", "--cluster", "local", "--wait"], folder)
    assert submitted.returncode == 0, submitted.stdout
    for command, shown in shown_commands("docs/runs.md"):
        assert_shown(run(shlex.split(command), folder).stdout, shown)
    assert len(shown_commands("docs/runs.md")) == 2


@pytest.mark.slow
def test_demo_prints_what_the_readme_shows(tmp_path: Path) -> None:
    [shown] = [output for command, output in shown_commands() if command == "make demo"]
    small = ["args.bytes=200000", "args.epochs=3", "args.width=64", "args.depth=2"]
    answer = run([sys.executable, str(ROOT / "jobs" / "demo.py"), *small], tmp_path)
    assert answer.returncode == 0, answer.stdout
    assert_shown(answer.stdout.replace(" " + " ".join(small), ""), shown)


def test_larger_spec_is_valid(folder: Path) -> None:
    small, large = blocks("yaml", "docs/spec-file.md")
    assert [small] == blocks("yaml")
    (folder / "large.yaml").write_text(large)
    answer = run(["hpcaccel", "validate", "large.yaml"], folder)
    assert answer.returncode == 0, answer.stdout


def test_function_of_the_page_returns_its_result(folder: Path) -> None:
    [program] = blocks("python", "docs/functions.md")
    (folder / "work.py").write_text(program)
    answer = run([sys.executable, "work.py"], folder)
    assert answer.stdout.splitlines()[-1] == "20", answer.stdout


def test_every_relative_link_of_the_readme_has_a_target() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", (ROOT / README).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []
    assert len(targets) > 20
