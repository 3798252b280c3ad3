"""``hpcaccel docs``, and the man pages."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys

import pytest

from tests.cli.conftest import ROOT, Shell


def test_a_page_is_printed_and_topics_are_listed(shell: Shell) -> None:
    assert shell("docs", "failures").stdout == (ROOT / "docs" / "failures.md").read_text()
    assert shell("docs", "docs/failures.md").stdout.startswith("# ")
    listed = dict(re.split(r"  +", line, maxsplit=1) for line in shell("docs").stdout.splitlines())
    assert listed["checkpoints"]
    assert {"skill", "slurm", "versions"} <= listed.keys()
    assert not {"index", "job", "api"} & listed.keys()


def test_unknown_topic_names_the_closest_page(shell: Shell, refused) -> None:
    said = refused(shell("docs", "chekpoints"))
    assert "there is no page 'chekpoints'. Did you mean 'checkpoints'? `hpcaccel docs` lists all pages" in said
    assert "there is no page 'zzz'. `hpcaccel docs`" in refused(shell("docs", "zzz"))


def test_every_topic_has_one_page() -> None:
    pages = [path.stem for path in (ROOT / "docs").rglob("*.md") if path.name != "index.md"]
    assert len(pages) == len(set(pages)), "hpcaccel docs finds a page by the name of its file"


def test_a_terminal_gets_a_formatted_page_in_the_pager(shell: Shell) -> None:
    shell.program("reader", f"cat > {shell.folder}/paged")
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "hpcaccel", "docs", "versions"]
    subprocess.run(command, cwd=shell.folder, env={**shell.environment, "PAGER": "reader"}, stdout=terminal, check=True)
    os.close(terminal)
    os.close(controller)
    paged = (shell.folder / "paged").read_text()
    assert "What was run" in paged
    assert "# Versions" not in paged


def test_generated_files_are_those_of_the_code() -> None:
    code = "import json; from hpcaccel_site.generated_files import generated_files as made; " + (
        "print(json.dumps({str(path): text for path, text in made().items()}))"
    )
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'docs' / 'extensions'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    made = json.loads(done.stdout)
    drawings = (ROOT / "docs" / "explanation").glob("*.svg")
    paths = [*(ROOT / "man").iterdir(), ROOT / "hpcaccel/cli/completion.json", *drawings]
    stored = {str(path): path.read_text() for path in paths}
    assert stored.keys() == made.keys(), "run: make generated"
    assert [path for path, text in stored.items() if made[path] != text] == [], "run: make generated"


def test_man_pages_are_valid_roff() -> None:
    if (groff := shutil.which("groff")) is None:
        pytest.skip("groff is not installed")
    pages = sorted((ROOT / "man").glob("*.1"))
    done = subprocess.run([groff, "-man", "-Tutf8", "-ww", *pages], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "SYNOPSIS" in re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout)
