"""Tests of the preflight checks of nodes before the ranks start, and of the nodes that they blame."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.launch_spec import LaunchSpec, RestartPolicy
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.allocation import SHORT_STEP
from hpcaccel.node.failures import preflight_checks
from hpcaccel.node.failures.preflight import Preflight, check_program, judge_together, preflight
from hpcaccel.node.failures.preflight_checks import TOKEN, WHERE, check_node, check_shared, serve_connection_test

from .conftest import LocalRun

HEALTHY = ["0, 00000000:3B:00.0, 0, No", "1, 00000000:5E:00.0, 0, No"]
ROWS = ["00000000:3B:00.0, 0, 0", "00000000:5E:00.0, 0, 0"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A node with two GPUs, and with nvidia-smi and dmesg whose output the test sets."""

    def says(gpus: list[str], *, rows: list[str] | None = None, code: int = 0, kernel: str = "", sleep: int = 0) -> Any:
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        (programs / "gpus").write_text("\n".join(gpus) + "\n")
        (programs / "rows").write_text("\n".join(ROWS if rows is None else rows) + "\n")
        (programs / "kernel").write_text(kernel)
        _program(
            programs / "nvidia-smi",
            f"sleep {sleep}; case $1 in *remapped*) cat {programs}/rows;; *) cat {programs}/gpus; exit {code};; esac",
        )
        _program(programs / "dmesg", f"cat {programs}/kernel")
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        env = {**os.environ, "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1", "TMPDIR": str(tmp_path)}
        return list(check_node(tmp_path, env))

    return says


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_healthy_node_has_no_findings(node: Any) -> None:
    assert node(HEALTHY) == []
    assert node(["0, 00000000:3B:00.0, [N/A], [N/A]", "1, 00000000:5E:00.0, [N/A], [N/A]"], rows=[]) == []


@pytest.mark.parametrize(
    ("gpus", "rows", "finding"),
    [
        (HEALTHY[:1], ROWS, "GPUs listed by nvidia-smi: 1 of 2"),
        (
            [HEALTHY[0], "1, 00000000:5E:00.0, 3, No"],
            ROWS,
            "GPU 1 (00000000:5E:00.0): uncorrectable ECC errors since the driver was loaded: 3",
        ),
        ([HEALTHY[0], "1, 00000000:5E:00.0, 0, Yes"], ROWS, "a memory page is pending retirement"),
        ([HEALTHY[0], "1, 00000000:5E:00.0, [GPU requires reset], [N/A]"], ROWS, "GPU requires reset"),
        ([HEALTHY[0], "1, 00000000:5E:00.0, [GPU is lost], [GPU is lost]"], ROWS, "GPU is lost"),
        (HEALTHY, [ROWS[0], "00000000:5E:00.0, 0, 1"], "could not be remapped"),
        (HEALTHY, [ROWS[0], "00000000:5E:00.0, Yes, No"], "a memory row is pending remapping"),
    ],
)
def test_broken_gpu_is_a_finding(node: Any, gpus: list[str], rows: list[str], finding: str) -> None:
    (found,) = node(gpus, rows=rows)
    assert finding in found


def test_gpus_of_other_jobs_are_ignored(node: Any) -> None:
    assert node([*HEALTHY, "2, 00000000:86:00.0, 5, Yes"]) == []


def test_failing_nvidia_smi_is_a_finding(node: Any) -> None:
    (found,) = node(["Unable to determine the device handle for GPU0000:5E:00.0: Unknown Error"], code=15)
    assert "exited with code 15" in found
    assert "Unknown Error" in found


def test_driver_that_lacks_a_field_is_no_finding(node: Any) -> None:
    assert node(['Field "retired_pages.pending" is not a valid field to query.'], code=2) == []


def test_hanging_nvidia_smi_is_a_finding(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_checks, "SMI_SECONDS", 0.2)
    assert node(HEALTHY, sleep=5) == ["nvidia-smi did not respond within 0.2 s"]


def test_only_recent_hardware_xids_of_own_gpus_are_findings(node: Any) -> None:
    now = time.clock_gettime(time.CLOCK_BOOTTIME)

    def xid(bus: str, number: int, *, ago: float = 60) -> str:
        return f"[{now - ago:12.6f}] NVRM: Xid (PCI:{bus}): {number}, pid=40121, name=python, words\n"

    (found,) = node(HEALTHY, kernel=xid("0000:5e:00", 79))
    assert found == "GPU 0000:5e:00: Xid 79, pid=40121, name=python, words"
    assert node(HEALTHY, kernel=xid("0000:5e:00", 31) + xid("0000:86:00", 79)) == []  # a program's fault; another GPU
    if now > 4000:
        assert node(HEALTHY, kernel=xid("0000:5e:00", 79, ago=3900)) == []


def test_gpus_are_not_checked_without_nvidia_smi(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "SLURM_GPUS_ON_NODE": "2", "TMPDIR": str(tmp_path)}
    assert list(check_node(tmp_path, env)) == []


def test_unwritable_directories_are_findings(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path / "gone")}
    (found,) = check_node(tmp_path, env, local=True)
    assert found == f"cannot write to the temporary directory {tmp_path / 'gone'}: No such file or directory"
    (found,) = check_shared(Path("/proc"), {"TMPDIR": str(tmp_path)})
    assert found.startswith("cannot write to the run directory /proc")


def test_directories_without_free_space_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_checks, "LEAST_BYTES", 1 << 62)
    (found,) = check_node(tmp_path, {"TMPDIR": "/dev/shm"}, local=True)
    assert found.startswith("the temporary directory /dev/shm has only ")
    assert found.endswith(" MiB free (required: 4398046511104)")
    # On the run directory's file system this is no finding about the node.
    assert list(check_node(tmp_path, {"TMPDIR": str(tmp_path)}, local=True)) == []
    (found,) = check_shared(tmp_path, {"TMPDIR": str(tmp_path)})
    assert found.endswith(" MiB free (required: 4398046511104)")


def test_connection_to_the_node_of_rank_0_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"TMPDIR": str(tmp_path)}
    monkeypatch.setenv("SLURMD_NODENAME", "localhost")
    with serve_connection_test(["localhost", "n2"]) as variables:
        assert list(check_node(tmp_path, {**here, **variables})) == []
        (found,) = check_node(tmp_path, {**here, **variables, TOKEN: "guessed"})
        assert "another program is listening" in found
    (found,) = check_node(tmp_path, {**here, **variables})
    assert "cannot connect to rank 0's node localhost: Connection refused" in found
    (found,) = check_node(tmp_path, {**here, TOKEN: "", WHERE: "no-such-node.invalid:80"})
    assert found == "the host name of rank 0's node, 'no-such-node.invalid', cannot be resolved here"
    with serve_connection_test(["elsewhere", "n2"]) as variables:
        assert variables == {}


@pytest.mark.parametrize(
    ("line", "findings", "said"),
    [
        (
            """echo '{"node": "n1", "findings": []}'; echo login; echo '{"node": "n2", "findings": ["x"]}'""",
            ["x"],
            "n2: x",
        ),
        (
            """echo '{"node": "n1", "findings": []}'""",
            ["the checks returned no result"],
            "n2: the checks returned no result",
        ),
        (
            "echo 'srun: error: Unable to create step' >&2; exit 1",
            None,
            "the checks did not run on any node: srun: error: Unable",
        ),
    ],
)
def test_all_nodes_are_checked_through_srun(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    line: str,
    findings: list[str] | None,
    said: str,
) -> None:
    _program(tmp_path / "srun", f"echo $* > {tmp_path}/words; {line}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = RunDir(tmp_path / "run")
    run.attempt(1).mkdir(parents=True)
    caplog.set_level("INFO", "hpcaccel")
    quick = replace(launch().resilience, preflight="quick")
    checked = preflight(run, launch(resilience=quick), attempt=1, nodes=["n1", "n2"], avoid=["n0"])
    assert checked.findings == ({"n1": [], "n2": findings} if findings is not None else {})
    assert said in caplog.messages[0]
    words = (tmp_path / "words").read_text()
    assert "--nodes=2 --ntasks=2" in words
    assert "--exclude=n0" in words
    assert SHORT_STEP in words.split()


# -- blamed nodes -------------------------------------------------------------------------------------------------


def test_node_that_differs_from_the_others_is_blamed() -> None:
    failure = Preflight(seconds=1, findings={"n1": [], "n2": ["GPU 1: GPU is lost"]}).failure(["n1", "n2"])
    assert failure is not None
    assert (failure.cause.name, failure.nodes, failure.detail) == ("preflight", ["n2"], "n2: GPU 1: GPU is lost")


def test_finding_on_all_nodes_blames_no_node() -> None:
    assert Preflight(seconds=1, findings={"n1": ["full"], "n2": ["full"]}).failure(["n1", "n2"]) is None
    assert Preflight(seconds=1, findings={}).failure(["n1", "n2"]) is None


@pytest.mark.parametrize(
    ("nodes", "amiss", "blamed"),
    [(["n1"], ["n1"], []), (["n1", "n2"], ["n1", "n2"], []), (["n1", "n2"], ["n2"], ["n2"])],
)
def test_node_is_blamed_for_a_shared_disk_only_if_others_can_write(
    nodes: list[str], amiss: list[str], blamed: list[str]
) -> None:
    shared = {node: ["the run directory cannot be written"] for node in amiss}
    failure = Preflight(seconds=1, findings={node: [] for node in nodes}, shared=shared).failure(nodes)
    assert ([] if failure is None else failure.nodes) == blamed


def test_finding_on_all_nodes_does_not_hide_that_of_one_node() -> None:
    shared = {node: ["the run directory cannot be written"] for node in ("n1", "n2")}
    failure = Preflight(seconds=1, findings={"n1": ["GPU is lost"], "n2": []}, shared=shared).failure(["n1", "n2"])
    assert failure is not None
    assert (failure.nodes, failure.detail) == (["n1"], "n1: GPU is lost")


def launch(**changes: Any) -> LaunchSpec:
    resilience = RestartPolicy(
        requeue=True,
        warning_seconds=1,
        stop_timeout_seconds=1,
        max_failures=1,
        max_preemptions=None,
        restart_in_place=0,
    )
    values: dict[str, Any] = {
        "kind": "program", "program": [], "python": sys.executable, "workdir": "/", "backend": "slurm", "nodes": 2,
        "ranks_per_node": 2, "stop": "cooperative", "resilience": resilience,
    }  # fmt: skip
    return LaunchSpec(**{**values, **changes})


def words(*which: tuple[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"rank": rank, "node": f"n{1 + rank // 2}", **said} for rank, said in which]


CAME = [(rank, {"came": True}) for rank in range(4)]


@pytest.mark.parametrize(
    ("said", "blamed", "together"),
    [
        ([*CAME, *((rank, {"done": True}) for rank in range(4))], [], ""),
        ([(rank, {"skipped": "no torch"}) for rank in range(4)], [], ""),
        ([*CAME[:3], (3, {"alone": "RuntimeError: cuda:1 returned a wrong matrix product"})], ["n2"], ""),
        (CAME[:2], ["n2"], ""),
        ([*CAME, (0, {"together": "DistBackendError: NCCL error"})], [], "DistBackendError: NCCL error"),
        (CAME, [], "the all-reduce over all ranks did not finish within 30 s"),
        ([], [], "the all-reduce over all ranks did not finish within 30 s"),
    ],
)
def test_results_of_the_joint_all_reduce_are_judged(
    said: list[tuple[int, dict[str, Any]]], blamed: list[str], together: str
) -> None:
    findings, nobody = judge_together(words(*said), launch(), ["n1", "n2"])
    assert (sorted(findings), nobody) == (blamed, together)


def test_check_program_succeeds_on_two_ranks() -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    ranks = [
        subprocess.Popen([sys.executable, *check_program()], env={**env, "RANK": str(rank)}, stdout=-1, text=True)
        for rank in range(2)
    ]
    said = [json.loads(line) for rank in ranks for line in rank.communicate(timeout=300)[0].splitlines()]
    assert judge_together(said, launch(nodes=1), ["n1"]) == ({}, "")


def test_local_run_records_its_quick_preflight(local_run: Any) -> None:
    run: LocalRun = local_run("print('ran')", preflight="quick")
    assert run.run() == 0
    document = json.loads((run.dir.attempt(1) / "preflight.json").read_text())
    assert (document["mode"], document["nodes"]) == ("quick", {"localhost": []})
    assert run.lines("end")[0]["preflight_seconds"] < 3
