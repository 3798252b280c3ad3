"""Invalid user input: one clear message, exit code 2, no traceback, no files left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
import typer

from hpcaccel.cli import main
from hpcaccel.cli.output import show_message
from hpcaccel.core import progress_notes
from hpcaccel.errors import SpecError
from hpcaccel.spec import load_spec

GOOD = """\
name: hello
entrypoint:
  command: [echo, hello]
slurm:
  nodes: 1
  ntasks_per_node: 1
  time: "10:00"
"""

SBATCH_REFUSES = """\
echo "sbatch: error: invalid partition specified: gpuu" >&2
echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
exit 1
"""

SPECS: dict[str, tuple[Any, str]] = {
    "missing": (None, "job.yaml"),
    "empty": ("", "job.yaml"),
    "only a comment": ("# later\n", "job.yaml"),
    "a list": ("- name: hello\n", "mapping"),
    "a word": ("hello\n", "mapping"),
    "duplicate keys": (GOOD + "name: again\n", "name"),
    "a wrong type": (GOOD.replace("nodes: 1", "nodes: [1, 2]"), "slurm.nodes"),
    "an unknown key": (GOOD.replace("  nodes: 1", "  nods: 1"), "Did you mean"),
    "no YAML": ("name: [unclosed\n", "job.yaml"),
    "a tab": ("name:\n\thello\n", "job.yaml"),
    "not UTF-8": (b"name: \xff\xfe\n", "UTF-8"),
    "a NUL": ("name: a\0b\n", "job.yaml"),
    "a signal of one's own": (GOOD + "  signal: USR1@60\n", "resilience"),
}


@pytest.fixture(params=SPECS, ids=lambda name: name.replace(" ", "-"))
def bad_spec(request, shell):
    """Write a bad job.yaml to the work folder. Value: words that the error message must contain."""
    text, words = SPECS[request.param]
    if text is not None:
        (shell.folder / "job.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return words


@pytest.mark.parametrize("command", [["validate"], ["render"], ["submit", "--cluster", "local"]], ids=lambda c: c[0])
def test_a_bad_spec_is_refused(shell, refused, bad_spec, command):
    before = shell.files()
    assert bad_spec in refused(shell(*command, "job.yaml"))
    assert shell.files() == before


def test_all_errors_of_a_spec_are_reported_at_once(shell, refused):
    shell.write("job.yaml", GOOD.replace("nodes: 1", "nodes: many").replace('"10:00"', "soon") + "colour: red\n")
    message = refused(shell("validate", "job.yaml"))
    for key in ("slurm.nodes", "slurm.time", "colour"):
        assert key in message
    assert "job.yaml:5" in message
    assert all(line.startswith("error: job.yaml:") for line in message.splitlines())


@pytest.mark.parametrize("override", ["nodes", "=4", "slurm.nodes=many", "colour=red", "nodes=4=5"])
def test_a_bad_override_is_refused(shell, spec, refused, override):
    before = shell.files()
    assert override.partition("=")[0] in refused(shell("submit", "job.yaml", override, "--cluster", "local"))
    assert shell.files() == before


@pytest.mark.parametrize("grid", ["args.lr", "slurm.nodes=", "colour=red,blue"])
def test_a_bad_grid_is_refused(shell, spec, refused, grid):
    before = shell.files()
    refused(shell("submit", "job.yaml", "--grid", grid, "--cluster", "local"))
    assert shell.files() == before


def test_directory_as_spec_is_refused(shell, refused):
    (shell.folder / "job.yaml").mkdir()
    assert "job.yaml" in refused(shell("validate", "job.yaml"))


def test_submit_without_slurm_suggests_the_local_backend(shell, spec, refused):
    before = shell.files()
    message = refused(shell("submit", "job.yaml"))
    assert "sbatch" in message
    assert "--cluster local" in message
    assert shell.files() == before


def test_unknown_cluster_is_refused(shell, spec, refused):
    before = shell.files()
    assert "alps" in refused(shell("submit", "job.yaml", "--cluster", "alps"))
    assert shell.files() == before


def test_job_refused_by_sbatch_leaves_no_files(shell, spec, refused):
    shell.program("sbatch", SBATCH_REFUSES)
    before = shell.files()
    assert "invalid partition" in refused(shell("submit", "job.yaml", "slurm.partition=gpuu")).lower()
    assert shell.files() == before
    assert shell("list", "--json").stdout.strip() == "[]"


def test_runs_dir_below_a_file_is_refused(shell, spec, refused):
    shell.write("occupied", "")
    before = shell.files()
    assert "occupied" in refused(shell("submit", "job.yaml", "--cluster", "local", "--runs-dir", "occupied/runs"))
    assert shell.files() == before


@pytest.mark.parametrize("part", [0, 0.3, 0.7, 0.95])
def test_submit_on_a_full_disk_leaves_no_files(shell, spec, refused, mounted, part):
    """The disk is full at once, or after submit has written a part of its files."""
    assert shell("submit", "job.yaml", "--cluster", "local", "--wait").returncode == 0
    written = ("node.pyz", "job.sbatch", "spec.json", "spec.yaml", "record.json")
    needed = sum(path.stat().st_size for path in (shell.folder / "runs").rglob("*") if path.name in written)
    runs = mounted("size=1m")
    free = os.statvfs(runs).f_bavail * os.statvfs(runs).f_frsize
    ballast = runs / "ballast"
    ballast.write_bytes(bytes(free - int(part * needed)))

    message = refused(shell("submit", "job.yaml", "--cluster", "local", "--runs-dir", str(runs)))

    assert "No space left" in message
    assert [path for path in runs.rglob("*") if path != ballast] == []


def test_submit_on_a_read_only_disk_is_refused(shell, spec, refused, mounted):
    runs = mounted("ro")
    message = refused(shell("submit", "job.yaml", "--cluster", "local", "--runs-dir", str(runs)))
    assert "Read-only" in message


@pytest.mark.parametrize("command", ["status", "wait", "stop", "resume", "cancel", "shell", "logs"])
def test_unknown_run_is_refused(shell, refused, command):
    assert "20991231" in refused(shell(command, "20991231"))


def test_logs_without_any_run_is_refused(shell, refused):
    assert "no runs yet" in refused(shell("logs"))


def test_unknown_option_is_refused(shell, refused):
    assert "--colour" in refused(shell("list", "--colour"))


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [["validate", LONG], ["render", LONG], ["submit", LONG, "--cluster", "local"], ["init", LONG], ["status", LONG]],
    ids=lambda words: words[0],
)
def test_name_too_long_for_a_file_is_refused(shell, refused, words):
    assert LONG[:70] in refused(shell(*words))


@pytest.mark.parametrize(("escape", "why"), [("\\0", "contains a NUL character"), ("\\ud800", "is not valid text")])
@pytest.mark.parametrize("key", ["extends", "workdir"])
def test_path_with_nul_or_surrogate_is_refused(shell, refused, key, escape, why):
    shell.write("job.yaml", GOOD + f'{key}: "a{escape}b"\n')
    message = refused(shell("validate", "job.yaml"))
    assert f"job.yaml:8: {key}" in message
    assert why in message


def test_control_characters_of_a_spec_are_escaped_in_messages(shell, refused):
    shell.write("job.yaml", GOOD + '"k\\e[31m\\a\\u202e": 1\n')
    message = refused(shell("validate", "job.yaml"))
    assert r"k\x1b[31m\x07\u202e is not a known key" in message
    assert message.replace("\n", "").isprintable()


def test_value_of_a_megabyte_is_shortened_in_messages(shell, refused):
    shell.write("job.yaml", GOOD.replace("name: hello", f"name: {'y' * 1_000_000}"))
    message = refused(shell("validate", "job.yaml"))
    assert len(message) < 2000
    shell.write("job.yaml", GOOD + f'"{"k " * 500_000}": 1\n')
    assert len(refused(shell("validate", "job.yaml"))) < 10_000


def test_spec_is_read_from_standard_input(shell):
    told = shell("validate", "-", input=GOOD)
    assert (told.returncode, told.stdout) == (0, "- is valid: hello, 1 node × 1 rank\n")


def test_paths_of_a_spec_from_a_pipe_are_relative_to_current_directory(shell):
    os.mkfifo(shell.folder / "pipe")
    shell.write("train.py", "")
    text = GOOD.replace("command: [echo, hello]", "script: train.py")
    writer = threading.Thread(target=(shell.folder / "pipe").write_text, args=[text])
    writer.start()
    told = shell("validate", "pipe")
    writer.join()
    assert told.returncode == 0, told


def test_reading_a_pipe_without_a_writer_shows_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_notes, "SILENT_SECONDS", 0.01)
    os.mkfifo(tmp_path / "pipe")
    told = []

    def write(sentence):
        told.append(sentence)
        (tmp_path / "pipe").write_text(GOOD)

    token = progress_notes.SHOW_NOTE.set(write)
    try:
        assert load_spec(tmp_path / "pipe").name == "hello"
    finally:
        progress_notes.SHOW_NOTE.reset(token)
    assert "a pipe (Ctrl-C to cancel)" in told[0]


def test_deleted_current_directory_causes_no_traceback(shell):
    gone = shell.folder / "gone"
    gone.mkdir()
    program = (
        "import os, sys; os.rmdir(os.getcwd()); "
        "os.execv(sys.executable, [sys.executable, '-m', 'hpcaccel', *sys.argv[1:]])"
    )
    for words, code in (
        (["list"], 0), (["status", "x"], 2), (["submit", "job.yaml"], 2), (["clean"], 2), (["sweep", "status", "x"], 2)
    ):  # fmt: skip
        gone.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            cwd=gone,
            env=shell.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        expected = "no run 'x'" if words[-1] == "x" else "the current directory no longer exists"
        assert expected in done.stderr or words == ["list"]


def test_error_on_a_terminal_is_coloured_and_wrapped_at_words(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    message = "slurm.nods is not a known key (allowed: account, partition, qos, reservation, nodes, ntasks_per_node)"
    show_message("error", message, colour="red")
    told = capsys.readouterr().err
    lines = re.sub(r"\x1b\[[0-9;]*m", "", told).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60
    assert " ".join(line.strip() for line in lines) == f"error: {message}"
    assert "\x1b[" in told


def test_hint_is_printed_with_its_own_prefix(capsys):
    error = SpecError("slurm.partition 'x' is not there", hints=["`hpcaccel cluster refresh` asks again"])
    with pytest.raises(typer.Exit):
        main._fail(error.problems, 2, hints=error.hints)
    assert capsys.readouterr().err.splitlines() == [
        "error: slurm.partition 'x' is not there", "hint: `hpcaccel cluster refresh` asks again"
    ]  # fmt: skip


def test_number_of_gpus_with_40_digits_is_refused(shell, refused):
    shell.write("job.yaml", GOOD + f"  gpus_per_node: {'1234567890' * 4}\n")
    assert "is not a valid number of GPUs (at most 9999)" in refused(shell("validate", "job.yaml"))
