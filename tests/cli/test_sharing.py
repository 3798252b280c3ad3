"""``sharing: group``: modes and checks here; with users of its own in the test at the end."""

from __future__ import annotations

import grp
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import StopRequest, all_requests, leave_request, open_requests
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import SpecError
from hpcaccel.spec import JobSpec, spec_from_values
from hpcaccel.submission.submit import sharing
from hpcaccel.submission.submit.sharing import group_of
from tests.cli.conftest import ROOT, SPEC, Result, Shell
from tests.cluster.dev_cluster import wait_until

GROUP = grp.getgrgid(os.getegid()).gr_name


def spec(setting: Any) -> JobSpec:
    return spec_from_values({"name": "toy", "entrypoint": {"command": ["true"]}, "sharing": setting})


def run_in(folder: Path) -> RunDir:
    return RunDir(folder / "toy" / "20261128-100000-abcd")


@pytest.fixture
def team() -> Iterator[Path]:
    """A folder that everybody may enter; those of pytest are private."""
    folder = Path(tempfile.mkdtemp(prefix="hpcaccel-team-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_run_is_readable_for_the_group_whatever_the_umask(shell: Shell, team: Path) -> None:
    shell.write("job.yaml", f"{SPEC}sharing: {{group: {GROUP}}}\n")
    call = "import os, sys; os.umask(0o077); sys.argv[0] = 'hpcaccel'; from hpcaccel.cli.main import main; main()"
    words = ["submit", "job.yaml", "--cluster", "local", "--runs-dir", str(team / "runs"), "--wait", "--json"]
    result = shell(*words, python=call)
    assert result.returncode == 0, result.stderr
    run = RunDir(json.loads(result.stdout)["path"])
    seen = {path: path.stat() for path in [run.path, *run.path.rglob("*")] if not path.is_symlink()}
    assert {about.st_gid for about in seen.values()} == {os.getegid()}
    for path, about in seen.items():
        mode = stat.S_IMODE(about.st_mode)
        if stat.S_ISDIR(about.st_mode):
            assert mode == (0o2770 if path == run.control else 0o2750), (path, oct(mode))
        else:
            assert mode & 0o040, (path, oct(mode))
            assert path.is_relative_to(run.code) or not mode & 0o027, (path, oct(mode))
    assert run.rank_log(1, 0) in seen
    umask = [line for line in run.script.read_text().splitlines() if line.startswith(("umask ", "export SLURM_UMASK"))]
    assert [line.split("#")[0].strip() for line in umask] == ["umask 0027", "export SLURM_UMASK=0027"]


def test_profile_has_the_default_and_the_spec_decides(shell: Shell) -> None:
    profile = Path(shell.environment["XDG_CONFIG_HOME"]) / "hpcaccel" / "clusters" / "here.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(f"backend: local\nsharing: {{group: {GROUP}}}\n")
    shell.write("job.yaml", SPEC)
    umask = "umask 0027"
    assert umask in shell("render", "job.yaml", "--cluster", "here").stdout
    assert umask not in shell("render", "job.yaml", "--cluster", "here", "sharing=null").stdout
    assert umask not in shell("render", "job.yaml", "--cluster", "local").stdout


def test_unknown_setting_and_group_are_refused_before_anything_is_made(
    shell: Shell, refused: Callable[[Result[str]], str]
) -> None:
    shell.write("job.yaml", f"{SPEC}sharing: world\n")
    assert "must be group or {group: NAME}" in refused(shell("submit", "job.yaml", "--cluster", "local"))
    shell.write("job.yaml", f"{SPEC}sharing: {{group: no-such-group}}\n")
    before = shell.files()
    message = refused(shell("submit", "job.yaml", "--cluster", "local"))
    assert "'no-such-group' does not exist on this machine (your groups:" in message
    assert shell.files() == before


def test_group_of_the_parent_folder_is_the_default(team: Path) -> None:
    assert group_of(spec(None), run_in(team)) is None
    found = group_of(spec({"group": GROUP}), run_in(team))
    assert found is not None
    assert found.gid == os.getegid()
    if os.geteuid() == 0:
        os.chown(team, -1, grp.getgrnam("daemon").gr_gid)
        found = group_of(spec("group"), run_in(team / "not" / "there"))
        assert found is not None
        assert found.name == "daemon"


def test_group_that_cannot_be_used_is_refused(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = run_in(team)
    team.chmod(0o700)
    with pytest.raises(SpecError, match=rf"group '{GROUP}' cannot enter {team} \(mode 0700\)"):
        group_of(spec({"group": GROUP}), place)
    team.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.setattr(os, "getgroups", lambda: [os.getegid()])
    other = next(one.gr_name for one in grp.getgrall() if one.gr_gid != os.getegid())
    with pytest.raises(SpecError, match=f"you are not a member of group '{other}' \\(yours: {GROUP}\\)"):
        group_of(spec({"group": other}), place)
    monkeypatch.setattr(sharing, "_user", lambda: GROUP)
    if not grp.getgrgid(os.getegid()).gr_mem:
        with pytest.raises(SpecError, match="which has no other member"):
            group_of(spec("group"), place)


def test_trials_and_workers_are_shared_like_their_sweep(tmp_path: Path) -> None:
    sweep = SweepDir(tmp_path / "20261128-100000-abcd")
    sweep.create()
    sweep.trial(0).create()
    assert stat.S_IMODE(sweep.trial(0).control.stat().st_mode) == 0o750
    sweep.control.chmod(0o2770)
    sweep.trial(1).create()
    sweep.worker(0).prepare()
    assert [stat.S_IMODE(one.control.stat().st_mode) for one in (sweep.trial(1), sweep.worker(0))] == [0o2770] * 2


def test_requests_that_cannot_be_used_are_ignored(tmp_path: Path) -> None:
    """Whoever may write to ``control/`` must not be able to end the supervisor with a file."""
    run = run_in(tmp_path)
    run.create()
    before = os.umask(0o077)
    leave_request(run, StopRequest(reason="stop", then="pause", time=1.0))
    os.umask(before)
    (made,) = run.control.iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == 0o640, "the owner of the run reads it, too"
    (run.control / "stop-1.json").write_text("{")
    write_json(run.control / "stop-2.json", {"then": "pause"})
    write_json(run.control / "stop-3.json", {"reason": "stop", "then": "explode", "time": 1.0})
    (run.control / "stop-4.json").mkdir()
    (run.control / "stop-5.json").symlink_to("/nowhere")
    write_json(run.control / "stop-6.json", {"reason": "stop", "then": "pause", "time": "now"})
    assert [name for name, _ in open_requests(run)] == [made.name]
    assert len(all_requests(run)) == 1


# -- with users -------------------------------------------------------------------------------------------------------

LOOP = """\
import os
import time
import torch
from torch import nn
from helper import FIRST
from hpcaccel import Accelerator

accelerator = Accelerator()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(400, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
print("started at", accelerator.resume().step, flush=True)
for _ in accelerator.epochs(1):
    for (batch,) in loader:
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.checkpoint()
        time.sleep(1.0 if os.path.exists("HOLD") else 0)
"""


class User:
    """A user of this machine, made for the test."""

    def __init__(self, name: str, group: str | None, python: str) -> None:
        subprocess.run(["useradd", "-m", *(["-G", group] if group else []), name], check=True)
        self.name = name
        self.group = group
        self.home = Path(f"/home/{name}")
        self.python = python
        self.more: dict[str, str] = {}
        """Further variables of the user's environment."""

    def __call__(self, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        site = ":".join(path for path in sys.path if path.endswith("site-packages"))
        environment = {
            "HOME": str(self.home), "PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{site}", "USER": self.name,
            "HPCACCEL_HEARTBEAT_SECONDS": "0.5", "OMP_NUM_THREADS": "1", **self.more,
        }  # fmt: skip
        command = [
            shutil.which("runuser") or "",
            "-u",
            self.name,
            "--",
            "bash",
            "-c",
            'umask 077; exec "$@"',
            "-",
            self.python,
        ]
        answer = subprocess.run(
            [*command, "-m", "hpcaccel", *words],
            env=environment, cwd=self.home, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert code is None or answer.returncode == code, answer.stdout + answer.stderr
        return answer

    def remove(self) -> None:
        subprocess.run(["userdel", "-r", self.name], check=False, capture_output=True)


@pytest.fixture
def python() -> str:
    """An interpreter that other users may run; that of a virtual environment may be in root's home."""
    if os.geteuid() != 0 or shutil.which("useradd") is None or shutil.which("runuser") is None:
        pytest.skip("making users needs root, useradd and runuser")
    minor = f"python3.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{minor}", f"/usr/local/bin/{minor}"):
        if Path(candidate).exists() and not subprocess.call(
            ["runuser", "-u", "nobody", "--", candidate, "-c", "1"], stderr=subprocess.DEVNULL
        ):
            return candidate
    pytest.skip(f"no {minor} that other users may run")


@pytest.fixture
def users(python: str) -> Iterator[dict[str, User]]:
    group = f"hpc{os.getpid()}"
    subprocess.run(["groupadd", group], check=True)
    made: dict[str, User] = {}
    try:
        for name in ("alice", "bob", "eve"):
            made[name] = User(f"{name}{os.getpid()}", None if name == "eve" else group, python)
        yield made
    finally:
        for user in made.values():
            user.remove()
        subprocess.run(["groupdel", group], check=False)


@pytest.mark.chaos
@pytest.mark.torch
def test_colleague_looks_stops_and_continues_and_a_stranger_cannot(users: dict[str, User], team: Path) -> None:
    alice, bob, eve = users.values()
    group = f"hpc{os.getpid()}"
    shutil.chown(team, group=group)
    team.chmod(0o2770)
    project = alice.home / "project"
    project.mkdir()
    hold = team / "hold"
    hold.touch()
    (project / "train.py").write_text(LOOP.replace("HOLD", str(hold)))
    (project / "helper.py").write_text("FIRST = 1\n")
    values = {
        "name": "shared", "entrypoint": {"script": "train.py"}, "sharing": "group",
        "slurm": {"ntasks_per_node": 1, "time": 10}, "environment": {"python": alice.python},
        "checkpoint": {"every_steps": 5},
    }  # fmt: skip
    (project / "job.yaml").write_text(json.dumps(values))
    for path in (project / "train.py", project / "helper.py"):
        path.chmod(0o600)
    for path in (project, *project.iterdir()):
        shutil.chown(path, alice.name, alice.name)
    words = ("--cluster", "local", "--runs-dir", str(team / "runs"), "--json")
    run = RunDir(json.loads(alice("submit", str(project / "job.yaml"), *words).stdout)["path"])
    name = str(run.path)

    wait_until(lambda: any(run.checkpoints.glob("step_*/COMMITTED")), "the first checkpoint", timeout_seconds=120)
    assert json.loads(bob("status", name, "--json").stdout)["state"] == "running"
    assert "started at 0" in bob("logs", name).stdout
    bob("report", name)
    bob("save", name)
    assert eve("status", name, code=2).stdout == ""
    assert eve("stop", name, code=2).stdout == ""

    refused = bob("resume", name, code=2).stderr
    assert "stop it first" in refused
    bob("stop", name)
    assert alice("wait", name, code=None).returncode == 85
    before = {path: path.stat().st_mtime for path in run.path.rglob("*") if path.is_file()}

    hold.unlink()
    own = json.loads(bob("resume", name, "--json").stdout)
    assert own["run_id"] != run.run_id
    assert Path(own["path"]).stat().st_uid == bob.home.stat().st_uid
    bob("wait", own["run_id"])
    said = bob("logs", own["run_id"]).stdout
    assert "started at" in said
    assert "started at 0" not in said
    assert {path: path.stat().st_mtime for path in run.path.rglob("*") if path.is_file()} == before
    assert eve("resume", name, code=2).stdout == ""
    alice("resume", name)
    assert alice("wait", name, code=None).returncode == 0
