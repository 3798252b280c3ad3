"""The self-test of real ranks, each on a node of its own by name, with faults planted in one of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcaccel.runtime.distributed.rank_env import ALONE
from hpcaccel.runtime.selftest import node_checks, pair_links
from hpcaccel.runtime.selftest.check_runner import CheckRunner, ResultLog
from hpcaccel.runtime.selftest.pair_links import tournament
from hpcaccel.view.selftest_results import SelftestResults, read_results
from hpcaccel.view.selftest_verdict import SelftestVerdict, judge

from .ranks import PROGRAMS, ROOT, free_port, run_ranks

pytestmark = pytest.mark.torch

CHECKS = [
    "environment", "rendezvous", "connections", "kernel", "disks", "network", "gpus", "ready", "groups", "device",
    "collectives", "pairs", "clocks", "training", "checkpoint", "end",
]  # fmt: skip


def run(
    folder: Path, fault: str = "none", *words: str, victim: int = 1, size: int = 2, timeout: int = 6
) -> tuple[SelftestResults, SelftestVerdict, list[str]]:
    results = folder / "results"
    arguments = [fault, str(victim), *words, "--results", str(results), "--timeout", str(timeout), "--cpu"]
    ended = run_ranks("selftest_rank.py", arguments, size=size)
    found = read_results(results, outputs=ended.outputs, expected=size)
    return found, judge(found), ended.outputs


def bad_of(verdict: SelftestVerdict, *, but: str = "slow_link") -> dict[str, set[str]]:
    """The kinds of problems of each bad node.

    Args:
        but: a kind that is left out. On a busy machine, two of three links may be slow.
    """
    found: dict[str, set[str]] = {}
    for problem in verdict.problems:
        if problem.severity == "bad" and problem.kind != but:
            found.setdefault(problem.node, set()).add(problem.kind)
    return found


def messages(verdict: SelftestVerdict) -> str:
    return "\n".join(problem.message for problem in verdict.problems)


def test_healthy_ranks_pass_every_check(tmp_path: Path) -> None:
    results, verdict, outputs = run(tmp_path, size=3, timeout=60)
    assert bad_of(verdict) == {}, (messages(verdict), outputs)
    for process in results.processes:
        states = {name: check.state for name, check in process.checks.items() if name != "gpus"}
        assert states == dict.fromkeys([name for name in CHECKS if name != "gpus"], "ok")
        assert len(process.data("collectives", "done")) == 6 * 7
        assert process.data("collectives", "wrong") == {}
    assert sorted(link["ranks"] for link in verdict.links) == [[0, 1], [0, 2], [1, 2]]
    assert all(link["mb_per_s"] > 0 and link["latency_us"] > 0 for link in verdict.links)
    assert [node.clock_ms is not None and abs(node.clock_ms) < 100 for node in verdict.nodes] == [True] * 3
    assert not (tmp_path / "results" / "selftest-checkpoint").exists()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("absent", "never_started", "rank 1 of 2 left no result"),
        ("wrong_size", "world_size", "world size"),
        ("sends_wrong", "wrong_result", "rank 1 sent wrong numbers in collectives"),
        ("receives_wrong", "wrong_result", "rank 1 received wrong numbers in collectives"),
        ("pairs_send_wrong", "wrong_result", "2 links of this node are corrupt (n0 – n1: "),
        ("pairs_receive_wrong", "wrong_result", "2 links of this node are corrupt (n0 – n1: "),
        ("clock", "clock", "ahead of the median"),
        ("dies", "ended_early", "rank 1 ended or was killed during the check 'clocks'"),
        ("wrong_training", "wrong_training", "a loss computed on rank 1 is"),
        ("device", "wrong_result", "cpu returned a wrong matrix product"),
    ],
)
def test_planted_fault_is_found_on_the_victims_node(tmp_path: Path, fault: str, kind: str, words: str) -> None:
    size = 3 if fault in ("receives_wrong", "clock", "pairs_send_wrong", "pairs_receive_wrong") else 2
    results, verdict, outputs = run(tmp_path, fault, size=size, timeout=3 if fault == "absent" else 20)
    text = messages(verdict).replace(f"of {size}", "of 2")
    assert bad_of(verdict) == {"n1": {kind}}, (text, outputs)
    assert words in text
    if fault in ("sends_wrong", "receives_wrong", "clock", "device"):
        checkpoints = [one.checks["checkpoint"] for one in results.processes]
        assert [check.state for check in checkpoints] == ["ok"] * size, (checkpoints, outputs)


def test_rank_that_was_started_twice_is_named(tmp_path: Path) -> None:
    _, verdict, outputs = run(tmp_path, "twice", timeout=3)
    assert bad_of(verdict) == {"n1": {"twice", "never_started"}}, (messages(verdict), outputs)
    assert "2 processes have rank 0: n0 (process " in messages(verdict)


@pytest.mark.chaos
def test_rank_that_hangs_is_named_and_the_others_end(tmp_path: Path) -> None:
    """Its limit is the timeout and 20 s, in each check."""
    _, verdict, outputs = run(tmp_path, "hangs", timeout=1)
    assert bad_of(verdict) == {"n1": {"hung"}}, (messages(verdict), outputs)
    assert "rank 1 hung in the check 'training' at 'its beginning'" in messages(verdict)


def test_old_kernel_is_a_warning(tmp_path: Path) -> None:
    _, verdict, _ = run(tmp_path, "old_kernel")
    assert bad_of(verdict) == {}
    found = [problem for problem in verdict.problems if problem.kind == "kernel"]
    assert [(one.node, one.severity) for one in found] == [("n1", "warning")]
    assert "4.18.0-553.el8.x86_64 is older than 5.5" in found[0].message


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "hpcaccel-test", str(folder)], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"this machine does not allow a mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_of_a_node_is_named(tmp_path: Path, small_disk: Path) -> None:
    (small_disk / "data").write_bytes(bytes(15 << 20))
    results, verdict, outputs = run(tmp_path, "full_disk", str(small_disk))
    assert bad_of(verdict) == {"n1": {"disk_full"}}, (messages(verdict), outputs)
    assert f"cannot write 8.4 MB to {small_disk} (no space left)" in messages(verdict)
    states = {one.rank: one.checks["checkpoint"].state for one in results.processes}
    assert states == {0: "skipped", 1: "skipped"}, "all ranks leave out the checkpoint"


def test_nearly_full_disk_is_a_warning(tmp_path: Path, small_disk: Path) -> None:
    runner = CheckRunner(ResultLog(tmp_path, rank=0, node="n0"))
    assert runner.local("disks", lambda: node_checks.check_disks(runner, [small_disk]), seconds=30) is True
    (problem,) = judge(read_results(tmp_path)).problems
    assert (problem.kind, problem.severity) == ("disk_full", "warning")
    assert f"{small_disk} is nearly full: 16.8 MB of 16.8 MB free" in problem.message


def test_results_on_a_full_disk_go_to_the_output(
    small_disk: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (small_disk / "data").write_bytes(bytes(15 << 20))
    with (small_disk / "rest").open("wb", buffering=0) as rest:
        rest.write(bytes(2 << 20))  # a partial write
    ResultLog(small_disk, rank=3, node="n3").write("environment", "ok", data={"world_size": 4})
    results = read_results(small_disk, outputs=[capfd.readouterr().out])
    assert (results.missing, results.places) == ([0, 1, 2], {3: "n3"})


def test_killed_ranks_are_read_from_the_results(tmp_path: Path) -> None:
    for rank in range(3):
        ResultLog(tmp_path, rank=rank, node=f"n{rank}", pid=rank).write("pairs", "began")
    ResultLog(tmp_path, rank=1, node="n1", pid=1).write("process", "killed", message="was killed by SIGKILL")
    assert ResultLog(tmp_path, rank=0).killed_ranks() == {1}


# -- checks of one node ------------------------------------------------------------------------------------------------


def test_check_that_hangs_in_a_system_call_is_left_after_its_limit(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    runner = CheckRunner(ResultLog(tmp_path, rank=0, node="n0"))
    assert runner.local("disks", fifo.read_bytes, seconds=0.2) is None
    (problem,) = judge(read_results(tmp_path, expected=1)).problems[:1]
    assert (problem.node, problem.kind) == ("n0", "timeout")
    os.close(os.open(fifo, os.O_WRONLY))  # lets the thread end


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("NCCL_SOCKET_IFNAME", "et", True),
        ("NCCL_SOCKET_IFNAME", "=et", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "=eth0,eth1", True),
        ("NCCL_SOCKET_IFNAME", "=ib0,ib1", False),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", False),
        ("NCCL_SOCKET_IFNAME", "ib", False),
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", False),
    ],
)
def test_interface_variable_that_selects_nothing_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, fits: bool
) -> None:
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setenv(name, value)
    runner = CheckRunner(ResultLog(tmp_path, rank=0, node="n0"))
    runner.local("network", lambda: node_checks.check_network(runner, ALONE), seconds=30)
    kinds = [problem.kind for problem in judge(read_results(tmp_path)).problems if problem.kind == "interface"]
    assert kinds == ([] if fits else ["interface"])


@pytest.mark.parametrize(("version", "shown"), [((2, 27, 3), "2.27.3"), ((2, 21, 5, "custom"), "2.21.5.custom")])
def test_version_of_nccl_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[Any, ...], shown: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: version)
    runner = CheckRunner(ResultLog(tmp_path, rank=0, node="n0"))
    runner.local("network", lambda: node_checks.check_network(runner, ALONE), seconds=30)
    assert read_results(tmp_path).processes[0].data("network", "nccl") == shown


def test_infiniband_port_that_is_down_beside_others_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "ib" / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    monkeypatch.setattr(node_checks, "INFINIBAND", tmp_path / "ib")
    runner = CheckRunner(ResultLog(tmp_path, rank=0, node="n0"))
    runner.local("network", lambda: node_checks.check_network(runner, ALONE), seconds=30)
    found = [problem for problem in judge(read_results(tmp_path)).problems if problem.kind == "infiniband"]
    assert [(one.severity, "mlx5_1:1 is not active (1: DOWN)" in one.message) for one in found] == [("warning", True)]


NVIDIA_SMI = """\
#!/bin/sh
case "$1" in
  -L) echo "GPU 0: NVIDIA H100 (UUID: GPU-1)" ;;
  --query-gpu=driver*) echo 570.124.06 ;;
  --query-gpu=*) echo "0, 00000000:3B:00.0, 7, No" ;;
  --query-remapped-rows=*) echo "00000000:3B:00.0, No, No" ;;
esac
"""


@pytest.fixture
def with_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program ``nvidia-smi`` that knows one GPU, with uncorrectable ECC errors."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpu_messages(folder: Path) -> list[str]:
    runner = CheckRunner(ResultLog(folder, rank=0, node="n0"))
    runner.local("gpus", lambda: node_checks.check_gpus(runner, ALONE, folder), seconds=60)
    return [problem.message for problem in judge(read_results(folder)).problems]


def test_gpu_with_ecc_errors_is_found_by_the_preflights_check(
    with_nvidia_smi: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = SimpleNamespace(name="H100", total_memory=80 << 30)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: about)
    assert gpu_messages(tmp_path) == [
        "GPU 0 (00000000:3B:00.0): uncorrectable ECC errors since the driver was loaded: 7"
    ]
    data = read_results(tmp_path).processes[0].checks["gpus"].data
    assert (data["driver"], data["names"]) == ("570.124.06", ["H100"])


def test_gpu_that_torch_cannot_use_is_found(
    with_nvidia_smi: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (message,) = gpu_messages(tmp_path)
    assert message.startswith("nvidia-smi lists 1 GPUs, but torch ")


def test_links_between_devices_use_large_messages_and_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device ``meta`` stands in for a device that is neither a CPU nor of CUDA."""
    waited: list[str] = []
    monkeypatch.setattr("hpcaccel.runtime.distributed.device_backend.synchronize", lambda one: waited.append(one.type))
    monkeypatch.setattr("torch.distributed.send", lambda *_: None)
    monkeypatch.setattr(pair_links._Link, "_receive", lambda _: 1)
    link = pair_links._Link(torch.device("meta"), 1)
    assert link._message(link._most).numel() == pair_links.MOST_BYTES
    link._transfer(pair_links.FIRST_BYTES, sends=True)
    assert waited == ["meta", "meta"]


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_in_the_tournament_each_player_meets_each_other_once(count: int) -> None:
    rounds = list(tournament(list(range(10, 10 + count))))
    pairs = [pair for one in rounds for pair in one]
    assert sorted(pairs) == sorted((a, b) for a in range(10, 10 + count) for b in range(a + 1, 10 + count))
    assert all(len({end for pair in one for end in pair}) == 2 * len(one) for one in rounds)


# -- real networks -----------------------------------------------------------------------------------------------------


class Network:
    """Network namespaces with an address each, connected by a bridge in a further one."""

    def __init__(self, count: int) -> None:
        self.name = f"hp{os.getpid() % 100_000}"
        self.count = count

    def __enter__(self) -> Network:
        self.ip("netns", "add", f"{self.name}-s")
        self.inside("s", "ip", "link", "add", "br0", "type", "bridge")
        self.inside("s", "ip", "link", "set", "br0", "up")
        for number in range(self.count):
            self.ip("netns", "add", f"{self.name}-{number}")
            self.inside(
                "s", "ip", "link", "add", f"p{number}", "type", "veth", "peer", "eth0", "netns", f"{self.name}-{number}"
            )
            self.inside("s", "ip", "link", "set", f"p{number}", "master", "br0", "up")
            self.inside(number, "ip", "link", "set", "lo", "up")
            self.inside(number, "ip", "link", "set", "eth0", "up")
            self.inside(number, "ip", "address", "add", f"{address_of(number)}/24", "dev", "eth0")
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("s", *range(self.count)):
            subprocess.run(["ip", "netns", "delete", f"{self.name}-{name}"], check=False, capture_output=True)

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def inside(self, name: int | str, *words: str) -> None:
        subprocess.run(["ip", "netns", "exec", f"{self.name}-{name}", *words], check=True, capture_output=True)

    def drop_packets(self, number: int, to: int) -> None:
        """Packets from one namespace to another's address go to a hardware address that does not exist."""
        wrong = ("lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0")
        self.inside(number, "ip", "neighbour", "replace", address_of(to), *wrong)

    def slow_down(self, number: int, rate: str) -> None:
        """Limit both directions of a namespace's link, with a token bucket filter of tc."""
        limit = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
        self.inside(number, "tc", "qdisc", "add", "dev", "eth0", *limit)
        self.inside("s", "tc", "qdisc", "add", "dev", f"p{number}", *limit)

    def run(self, folder: Path, *, timeout: int) -> SelftestVerdict:
        """Run the self-test with a rank in each namespace."""
        port = free_port()
        shared = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "HPCACCEL_"))}
        shared |= {"MASTER_ADDR": address_of(0), "MASTER_PORT": str(port), "WORLD_SIZE": str(self.count)}
        shared |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        program = [sys.executable, str(PROGRAMS / "selftest_rank.py"), "none", "0"]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"{self.name}-{number}", *program, "--results", str(folder), "--cpu",
                 "--timeout", str(timeout)],
                env={**shared, "RANK": str(number)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for number in range(self.count)
        ]  # fmt: skip
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
        return judge(read_results(folder, outputs=outputs, expected=self.count))


def address_of(number: int) -> str:
    return f"10.231.0.{number + 1}"


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with Network(3) as found:
            yield found
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", b"") or str(error).encode()
        pytest.skip(f"this machine does not allow network namespaces: {detail.decode().strip()}")


@pytest.mark.chaos
def test_node_with_a_slow_link_is_named(network: Network, tmp_path: Path) -> None:
    network.slow_down(2, "100mbit")
    verdict = network.run(tmp_path, timeout=60)
    assert bad_of(verdict, but="") == {"n2": {"slow_link"}}, messages(verdict)
    assert "2 links of this node are slow (n0 – n2: " in messages(verdict)
    slow = [link["mb_per_s"] for link in verdict.links if "n2" in link["nodes"]]
    assert all(5 < speed < 20 for speed in slow), "100 Mbit/s are 12.5 MB/s"


@pytest.mark.chaos
def test_node_whose_packets_to_rank_0_are_lost_is_named(network: Network, tmp_path: Path) -> None:
    network.drop_packets(2, to=0)
    verdict = network.run(tmp_path, timeout=8)
    assert set(bad_of(verdict)) == {"n2"}, messages(verdict)
    assert "rank 2 of 3 did not reach 10.231.0.1 within" in messages(verdict)


@pytest.mark.chaos
def test_lost_packets_between_two_other_nodes_are_found_before_a_group_hangs(network: Network, tmp_path: Path) -> None:
    network.drop_packets(1, to=2)
    verdict = network.run(tmp_path, timeout=20)
    assert bad_of(verdict) == {"n1": {"no_connection"}, "n2": {"no_connection"}}, messages(verdict)
    assert re.search(r"n[12] cannot connect to n[12] at 10\.231\.0\.[23]:", messages(verdict))
