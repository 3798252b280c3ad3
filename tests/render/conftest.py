"""Fixtures of the render tests: specs to render, and a real bash that runs the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.spec import JobSpec

STUB = f"""#!{sys.executable} -I
import json, os, sys
me = os.path.abspath(__file__)
with open(os.path.join(os.path.dirname(me), "record.json"), "w") as file:
    json.dump({{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}, file)
"""
"""Replaces the Python that starts the supervisor; records its arguments, environment and directory."""

SCONTROL = """#!/bin/bash
[[ "$1 $2" == "show hostnames" ]] && printf '%s\\n' n7 n8
"""


@dataclass(frozen=True)
class Started:
    """Outcome of a script: exit code, output, and how it started the supervisor (empty if it did not)."""

    code: int
    output: str
    argv: list[str]
    env: dict[str, str]
    cwd: str


class Shell:
    """Runs batch scripts in an environment that contains only what the test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.python = self.program("python", STUB)
        self.program("scontrol", SCONTROL)

    def program(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, text: str, env: Mapping[str, str] | None = None, *, python: Path | None = None) -> Started:
        script = self.folder / "job.sbatch"
        script.write_text(text, encoding="utf-8")
        record = (python or self.python).parent / "record.json"
        record.unlink(missing_ok=True)
        base = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.folder), "SLURM_JOB_NODELIST": "n[7-8]"}
        result = subprocess.run(
            ["bash", str(script)],
            env={**base, **(env or {})},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=60,
            check=False,
        )
        seen: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {"argv": [], "env": {}, "cwd": ""}
        return Started(result.returncode, result.stdout, seen["argv"], seen["env"], seen["cwd"])


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def make_spec(**sections: Any) -> JobSpec:
    """A minimal spec plus the given sections."""
    return JobSpec.model_validate({"name": "gpt", "entrypoint": {"command": ["true"]}, **sections})


def golden(name: str, text: str) -> None:
    """Compare with a golden file; with HPCACCEL_UPDATE_GOLDEN=1, write it first."""
    path = Path(__file__).parent / "golden" / name
    if os.environ.get("HPCACCEL_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} differs: HPCACCEL_UPDATE_GOLDEN=1 pytest {__file__}"
