"""The development cluster: it behaves like a production Slurm, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import PROGRAM, Cluster, program, wait_until

LeaseNodes = Callable[[int], list[str]]


def test_nodes_and_partitions_are_up_and_accounting_responds(cluster: Cluster, lease: LeaseNodes) -> None:
    leased = lease(2)  # another test may have failed one of the others on purpose
    answer = cluster.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T")
    states = dict(line.split() for line in answer.stdout.splitlines())
    assert list(states) == cluster.nodes
    assert {states[node] for node in leased} <= {"idle", "planned", "completing"}
    partitions = cluster.run("sinfo", "-h", "-o", "%P").stdout.split()
    assert partitions == ["gpu*", "gpu0", "gpuc", "gpuc0", "urgent"]
    assert cluster.run("sacctmgr", "-n", "-P", "show", "cluster", "format=Cluster").stdout.split() == ["dev"]


def test_ranks_see_their_gpus_and_the_name_of_their_node(cluster: Cluster, lease: LeaseNodes, tmp_path: Path) -> None:
    nodes = lease(2)
    out = tmp_path / "out"
    script = _script(tmp_path, "srun sh -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES'", "getent hosts $(hostname)")
    job = cluster.sbatch(*_on(nodes), "--gpus-per-node=2", f"--output={out}", str(script))
    assert cluster.wait_for(job, ["COMPLETED", "FAILED"])["JobState"] == "COMPLETED"
    lines = out.read_text().splitlines()
    assert sorted(lines[:2]) == [f"{node} 0,1" for node in nodes]
    assert lines[2].split()[0] == "127.0.0.1"
    recorded = ["sacct", "-X", "-n", "-P", "-j", job, "-o", "State"]
    wait_until(lambda: cluster.run(*recorded).stdout.strip() == "COMPLETED", "sacct knows the end")


def test_preemption_with_grace_signals_only_the_ranks(cluster: Cluster, lease: LeaseNodes, tmp_path: Path) -> None:
    """`gpu`: the ranks get SIGTERM at once, the batch step nothing; a job that ends in the grace time is COMPLETED.

    From 24.05 on, Slurm then requeues it.
    """
    nodes = lease(1)
    job = _submit_listener(cluster, nodes, tmp_path, partition="gpu")
    urgent = cluster.sbatch(*_on(nodes), "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    wait_until(lambda: "TERM" in _heard(tmp_path, "rank"), "the rank hears SIGTERM")
    during = cluster.job(job)
    assert during["JobState"] == "RUNNING"
    assert during["PreemptTime"] != "None"
    assert _heard(tmp_path, "batch") == ["start"]
    (tmp_path / "leave").touch()
    after = cluster.wait_for(job, ["COMPLETED", "FAILED", "PENDING", "PREEMPTED"])
    expected = ("COMPLETED", "0") if cluster.release < (24, 5) else ("PENDING", "1")
    assert (after["JobState"], after["Restarts"]) == expected
    cluster.wait_for(urgent, ["COMPLETED"])


def test_preemption_without_grace_kills_and_requeues(cluster: Cluster, lease: LeaseNodes, tmp_path: Path) -> None:
    """`gpu0`: ranks and batch step get SIGTERM, and Slurm requeues the job by itself."""
    nodes = lease(1)
    job = _submit_listener(cluster, nodes, tmp_path, partition="gpu0")
    urgent = cluster.sbatch(*_on(nodes), "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    wait_until(lambda: "TERM" in _heard(tmp_path, "rank"), "the rank hears SIGTERM")
    wait_until(lambda: "TERM" in _heard(tmp_path, "batch"), "the batch step hears SIGTERM")
    assert cluster.job(job)["JobState"] in ("COMPLETING", "PENDING")
    refused = cluster.run("scontrol", "requeue", job, check=False)
    assert refused.returncode == 1
    assert "pending execution" in refused.stderr
    (tmp_path / "leave").touch()  # for this start, and for the next one too
    cluster.wait_for(urgent, ["COMPLETED"])
    assert cluster.wait_for(job, ["COMPLETED"])["Restarts"] == "1"


def test_array_task_is_requeued_alone(cluster: Cluster, lease: LeaseNodes, tmp_path: Path) -> None:
    nodes = lease(1)
    script = _script(tmp_path, "sleep 60")
    array = cluster.sbatch(*_on(nodes), "--array=0-1", f"--output={tmp_path}/%a", str(script))
    for task in (0, 1):
        cluster.wait_for(f"{array}_{task}", ["RUNNING"])
    cluster.run("scontrol", "requeue", f"{array}_1")
    wait_until(lambda: cluster.job(f"{array}_1")["Restarts"] == "1", "the task comes back")
    assert cluster.wait_for(f"{array}_1", ["RUNNING"])["Restarts"] == "1"
    assert cluster.job(f"{array}_0")["Restarts"] == "0"


def test_second_cluster_is_separate_and_leaves_nothing_behind(cluster: Cluster, new_root: Path) -> None:
    hosts_before = _foreign_hosts()
    program("up", "--root", str(new_root), "--nodes", "2")
    second = Cluster.at(new_root)
    assert set(second.nodes).isdisjoint(cluster.nodes)
    assert "already up" in program("up", "--root", str(new_root)).stderr
    differs = program("up", "--root", str(new_root), "--nodes", "3", check=False)
    assert differs.returncode == 2
    assert "nodes=2, not 3" in differs.stderr
    # A job with a task that has left its session, its parents and its environment.
    second.sbatch("--output=/dev/null", "--wrap=setsid env -i /bin/sleep 987654 & srun sleep 987654")
    wait_until(lambda: len(_processes_of(new_root, second.nodes)["sleep"]) == 2, "the job's two sleeps")
    everything = [pid for pids in _processes_of(new_root, second.nodes).values() for pid in pids]
    assert len(everything) >= 4 + 2 + 2 + 2, "daemons, step daemons, sleeps"
    _assert_loopback_only(everything)

    program("down", "--root", str(new_root))
    assert [pid for pid in everything if _runs(pid)] == []
    assert f"{new_root}\n" not in Path("/etc/hosts").read_text()
    assert _foreign_hosts() == hosts_before
    assert sorted(path.name for path in new_root.iterdir()) == ["cluster.lock", "log"]
    assert program("down", "--root", str(new_root)).returncode == 0
    cluster.run("scontrol", "ping")


@pytest.mark.chaos
def test_up_restarts_a_cluster_whose_daemons_were_all_killed(new_root: Path) -> None:
    program("up", "--root", str(new_root), "--nodes", "1")
    first = Cluster.at(new_root)
    first.sbatch("--output=/dev/null", "--wrap=sleep 987654")
    wait_until(lambda: bool(_processes_of(new_root, first.nodes)["sleep"]), "the job's sleep")
    before = _processes_of(new_root, first.nodes)
    for name, pids in before.items():
        for pid in pids:
            if name != "sleep":  # the job's own process stays alive: `up` has to find it
                os.kill(pid, signal.SIGKILL)
    assert program("status", "--root", str(new_root), check=False).returncode == 1
    assert "cleaning up after a crash" in program("up", "--root", str(new_root), "--nodes", "1").stderr
    assert not _runs(before["sleep"][0])
    second = Cluster.at(new_root)
    assert second.run("srun", "hostname").stdout.split() == second.nodes
    assert Path("/etc/hosts").read_text().count(f"{new_root}\n") == 1


@pytest.mark.chaos
def test_slurm_in_its_own_folder_is_found_by_login_shells_on_nodes(new_root: Path, tmp_path: Path) -> None:
    """/etc/profile resets PATH, without the folder of a Slurm that was built from source."""
    folder = tmp_path / "slurm" / "bin"
    folder.mkdir(parents=True)
    for name in ("sbatch", "srun", "scontrol", "sinfo", "squeue", "sacctmgr"):
        (folder / name).symlink_to(_system_program(name))
    path = f"{folder}:{os.environ['PATH']}"
    assert program("up", "--root", str(new_root), "--nodes", "1", PATH=path).returncode == 0
    own = Cluster.at(new_root)  # remembers the folder
    assert own.env["PATH"].startswith(f"{folder}:")
    out, script = tmp_path / "out", tmp_path / "job.sh"
    script.write_text("#!/bin/bash -l\ntype -P srun\n")
    own.wait_for(own.sbatch(f"--output={out}", str(script)), ["COMPLETED"])
    assert out.read_text() == f"{folder}/srun\n"


def test_programs_of_two_slurm_installations_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "bin" / "sbatch"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    path = f"{other.parent}:{os.environ['PATH']}"
    answer = program("up", "--root", f"{tmp_path}/root", check=False, PATH=path)
    assert answer.returncode == 2
    assert f"from different installations: {other}, " in answer.stderr


def test_error_of_sacctmgr_is_shown_while_up_waits_for_slurmdbd(new_root: Path, tmp_path: Path) -> None:
    refusing = tmp_path / "bin" / "sacctmgr"
    refusing.parent.mkdir()
    refusing.write_text("#!/bin/sh\necho sacctmgr: error: the database is of a later Slurm >&2\nexit 1\n")
    refusing.chmod(0o755)
    # If Slurm is in its own folder, the cluster uses that of sbatch.
    (refusing.parent / "sbatch").symlink_to(os.path.realpath(_system_program("sbatch")))
    env = {**os.environ, "PATH": f"{refusing.parent}:{os.environ['PATH']}"}
    up = [str(PROGRAM), "up", "--root", str(new_root), "--nodes", "1"]
    with subprocess.Popen(up, env=env, stderr=subprocess.PIPE, text=True) as starting:
        assert starting.stderr is not None
        said = next((line for line in starting.stderr if "waiting for" in line), "")
        starting.send_signal(signal.SIGINT)
        assert starting.wait(timeout=60) == 130
    assert "waiting for slurmdbd: sacctmgr: sacctmgr: error: the database is of a later Slurm" in said


def test_interrupted_up_leaves_nothing_behind(new_root: Path) -> None:
    starting = subprocess.Popen([str(PROGRAM), "up", "--root", str(new_root)], stderr=subprocess.DEVNULL)
    wait_until(lambda: "mariadb-install" in _processes_of(new_root, ["none1"]), "the database is being made")
    starting.send_signal(signal.SIGINT)
    assert starting.wait(timeout=60) == 130
    assert _processes_of(new_root, ["none1"]) == {"sleep": []}
    assert f"{new_root}\n" not in Path("/etc/hosts").read_text()
    assert sorted(path.name for path in new_root.iterdir()) == ["cluster.lock", "log"]


@pytest.mark.chaos
def test_failed_node_requeues_its_job_and_can_be_restored(new_root: Path) -> None:
    program("up", "--root", str(new_root), "--nodes", "2", "--slurmd-timeout-seconds", "5")
    own = Cluster.at(new_root)
    lost, kept = own.nodes
    job = own.sbatch(f"--nodelist={lost}", "--output=/dev/null", "--wrap=sleep 987654")
    own.wait_for(job, ["RUNNING"])
    program("fail", "--root", str(new_root), lost)
    assert _processes_of(new_root, [lost])["sleep"] == []
    own.wait_for(job, ["PENDING"])
    assert own.job(job)["Restarts"] == "1"
    assert own.run("sinfo", "-h", "-n", kept, "-p", "gpu", "-o", "%T").stdout.strip() == "idle"
    program("restore", "--root", str(new_root), lost)
    own.wait_for(job, ["RUNNING"])


def test_status_reports_a_failed_controller_and_restore_starts_it(new_root: Path) -> None:
    program("up", "--root", str(new_root), "--nodes", "1")
    own = Cluster.at(new_root)
    program("fail", "--root", str(new_root), "slurmctld")
    status = program("status", "--root", str(new_root))
    assert "slurmctld is not running (stopped by `fail`)" in status.stdout
    program("restore", "--root", str(new_root), "slurmctld")
    assert own.run("srun", "hostname").stdout.split() == own.nodes


def test_nothing_listens_beyond_loopback(cluster: Cluster, lease: LeaseNodes) -> None:
    nodes = lease(2)
    job = cluster.sbatch(*_on(nodes), "--output=/dev/null", "--wrap=srun sleep 987654")
    wait_until(lambda: len(_processes_of(cluster.root, nodes)["sleep"]) == 2, "the two tasks")
    # Not those of the other nodes, where ranks listen on all addresses.
    everything = [pid for pids in _processes_of(cluster.root, nodes).values() for pid in pids]
    _assert_loopback_only(everything)
    cluster.run("scancel", job)


def test_missing_package_is_named_with_the_install_command(tmp_path: Path) -> None:
    answer = _run_without_slurmd(str(PROGRAM), "up", "--root", f"{tmp_path}/root")
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: not installed: slurmd. ")
    assert "apt-get install" in answer.stderr


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_skipped_cluster_tests_print_a_banner_and_fail_in_ci(ci: str, code: int) -> None:
    one = f"{__file__}::test_nothing_listens_beyond_loopback"
    answer = _run_without_slurmd(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", one, CI=ci)
    assert answer.returncode == code
    banner = answer.stdout.splitlines()[-4:]
    assert any(line.startswith("!!!") and "CLUSTER TESTS SKIPPED: 1" in line for line in banner)
    assert any("not installed: slurmd" in line for line in banner)


def test_directory_with_other_files_is_refused_as_root(new_root: Path) -> None:
    thesis = new_root / "thesis.tex"
    thesis.write_text("x")
    answer = program("up", "--root", str(new_root), check=False)
    assert answer.returncode == 2
    assert "contains other files" in answer.stderr
    program("down", "--root", str(new_root))
    assert [path.name for path in new_root.iterdir()] == ["thesis.tex"]


def _run_without_slurmd(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a mount namespace that hides slurmd."""
    folders = [*os.environ["PATH"].split(":"), "/usr/local/sbin", "/usr/sbin", "/sbin"]
    found = {os.path.realpath(f"{folder}/slurmd") for folder in folders if Path(folder, "slurmd").exists()}
    hide = "".join(f"mount --bind /dev/null {shlex.quote(path)} && " for path in sorted(found)) + 'exec "$@"'
    own = {name: value for name, value in os.environ.items() if name != "HPCACCEL_TEST_CLUSTER"}
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", hide, "sh", *command],
        env={**own, **env},
        cwd=PROGRAM.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )


def _system_program(name: str) -> str:
    path = shutil.which(name)
    assert path is not None
    return path


def _on(nodes: list[str]) -> list[str]:
    return [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"]


def _script(directory: Path, *lines: str) -> Path:
    path = directory / "job.sh"
    path.write_text("\n".join(["#!/bin/bash", *lines]) + "\n")
    return path


def _submit_listener(cluster: Cluster, nodes: list[str], directory: Path, *, partition: str) -> str:
    """Start a job whose batch step and one rank record the signals they get, until a file `leave` appears."""
    listen = directory / "listen.sh"
    listen.write_text(
        'note() { echo "$1" >>$heard/$who; }; trap "note TERM" TERM; note start\n'
        "while [ ! -e $heard/leave ]; do sleep 0.1; done\n"
    )
    script = _script(
        directory, f"export heard={directory}", f"who=rank srun bash {listen} &", f"who=batch; . {listen}", "wait"
    )
    job = cluster.sbatch(
        *_on(nodes), f"--partition={partition}", "--exclusive", f"--output={directory}/out", str(script)
    )
    wait_until(lambda: _heard(directory, "rank") == ["start"] == _heard(directory, "batch"), "the job listens")
    return job


def _heard(directory: Path, who: str) -> list[str]:
    path = directory / who
    return path.read_text().split() if path.exists() else []


def _processes_of(root: Path, nodes: list[str]) -> dict[str, list[int]]:
    """Pids by program name of all processes of a cluster, from /proc and not from the cluster's records."""
    found: dict[str, list[int]] = {"sleep": []}
    own_names = {*nodes, re.sub(r"\d+$", "ctl", nodes[0])}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or not _runs(int(entry.name)):
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            name = (entry / "comm").read_text().strip()
            other_host = os.readlink(entry / "ns/uts") != os.readlink("/proc/self/ns/uts")
        except OSError:
            continue
        if f"{root}/" in command or (other_host and _hostname(int(entry.name)) in own_names):
            found.setdefault(name, []).append(int(entry.name))
    return found


def _hostname(pid: int) -> str:
    enter = ["nsenter", "-t", str(pid), "-u", "hostname"]
    return subprocess.run(enter, capture_output=True, text=True, check=False).stdout.strip()


def _runs(pid: int) -> bool:
    try:
        return not re.search(r"^State:\s+[ZX]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _assert_loopback_only(pids: list[int]) -> None:
    listening = subprocess.run(["ss", "-Hlntup"], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = [line for line in listening if any(f"pid={pid}," in line for pid in pids)]
    assert len(ours) >= 3, "slurmctld, slurmdbd and a slurmd listen"
    assert [line for line in ours if not line.split()[4].startswith("127.0.0.1:")] == []


def _foreign_hosts() -> list[str]:
    """Lines of /etc/hosts that belong to no development cluster: they must never change."""
    return [line for line in Path("/etc/hosts").read_text().splitlines() if "# hpcaccel-cluster " not in line]
