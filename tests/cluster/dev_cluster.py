"""A running development cluster: its commands and jobs, and leases of its nodes."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "docker" / "cluster"


def program(*args: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `docker/cluster` with these arguments and environment variables; the error of a failure has its stderr."""
    answer = subprocess.run(
        [str(PROGRAM), *args], env={**os.environ, **env}, capture_output=True, text=True, timeout=900, check=False
    )
    if check and answer.returncode:
        raise RuntimeError(f"docker/cluster {shlex.join(args)} ended with {answer.returncode}:\n{answer.stderr}")
    return answer


@contextmanager
def temporary_root() -> Iterator[Path]:
    """A root for a cluster, which is taken down at the end."""
    prefix = Path(os.environ["HPCACCEL_TEST_ROOTS"] + "-")
    root = Path(tempfile.mkdtemp(prefix=prefix.name, dir=prefix.parent))
    try:
        yield root
    finally:
        program("down", "--root", str(root))
        shutil.rmtree(root)


@contextmanager
def own_cluster(*options: str) -> Iterator[Cluster]:
    """A running cluster that no other test uses, so that its daemons and nodes may be stopped.

    Args:
        options: of `docker/cluster up`.
    """
    with temporary_root() as root:
        program("up", "--root", str(root), *options)
        yield Cluster.at(root)


def wait_until(condition: Callable[[], object], what: str, *, timeout_seconds: float = 300) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {timeout_seconds:.0f} s")
        time.sleep(0.2)


@dataclass(frozen=True)
class Cluster:
    root: Path
    env: dict[str, str]
    """This process's environment with the cluster's SLURM_CONF, and without variables of an outer job."""
    nodes: list[str]

    @classmethod
    def at(cls, root: Path) -> Cluster:
        exports = program("env", "--root", str(root)).stdout.splitlines()
        pairs = (shlex.split(line)[1].partition("=") for line in exports)
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_", "SALLOC_"))}
        # A Slurm that is not the system's own is put in front of PATH.
        env = {**outside, **{name: value.replace("$PATH", os.environ["PATH"]) for name, _, value in pairs}}
        sinfo = ["sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%N"]
        listed = subprocess.run(sinfo, env=env, capture_output=True, text=True, check=True)
        return cls(root=root, env=env, nodes=listed.stdout.split())

    @property
    def release(self) -> tuple[int, int]:
        """Slurm's release, such as (22, 5)."""
        year, month = self.run("sinfo", "--version").stdout.split()[-1].split(".")[:2]
        return int(year), int(month)

    @property
    def login_path(self) -> str:
        """PATH of a login node of this cluster."""
        sbatch = shutil.which("sbatch", path=self.env["PATH"])
        assert sbatch is not None
        return ":".join(dict.fromkeys([str(Path(sbatch).parent), "/usr/bin", "/bin"]))

    def run(self, *command: str, check: bool = True, timeout_seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command in the cluster's environment. With `check`, a failure raises RuntimeError with its stderr."""
        answer = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
        if check and answer.returncode:
            raise RuntimeError(f"{shlex.join(command)} ended with {answer.returncode}:\n{answer.stderr}")
        return answer

    def sbatch(self, *args: str) -> str:
        """Submit a job; return its id."""
        return self.run("sbatch", "--parsable", *args).stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of `scontrol show job`, such as JobState, Restarts, PreemptTime."""
        words = self.run("scontrol", "--oneliner", "show", "job", job_id).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job_id: str, states: Sequence[str], *, timeout_seconds: float = 300) -> dict[str, str]:
        """Wait until the job's JobState is one of `states`; return all its fields."""
        job: dict[str, str] = {}

        def reached() -> bool:
            job.update(self.job(job_id))
            return job["JobState"] in states

        try:
            wait_until(reached, f"job {job_id} {' or '.join(states)}", timeout_seconds=timeout_seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it is {job['JobState']}, {job['Reason']}") from None
        return job


@dataclass(frozen=True)
class Lease:
    """Nodes locked for this process; the locks end with the process."""

    cluster: Cluster
    nodes: list[str]
    locks: list[int]

    @classmethod
    def take(cls, cluster: Cluster, count: int, *, timeout_seconds: float = 300) -> Lease:
        """Lock ``count`` nodes, all or none, so that two tests cannot deadlock."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            lease = cls(cluster, [], [])
            for node in cluster.nodes:
                if len(lease.nodes) < count and (fd := _try_lock(cluster.root / "run" / f"lease-{node}")) is not None:
                    lease.nodes.append(node)
                    lease.locks.append(fd)
            if len(lease.nodes) == count:
                return lease
            lease._unlock()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} of {len(cluster.nodes)} nodes were not free for {timeout_seconds:.0f} s")
            time.sleep(0.5)

    def release(self) -> None:
        names = ",".join(self.nodes)
        # Includes pending jobs that request these nodes: squeue's --nodelist lists only running ones.
        listed = self.cluster.run("squeue", "--noheader", "--array", "--format=%i %n %N").stdout
        ours = [line.split()[0] for line in listed.splitlines() if self._concerns(line.split()[1:])]
        if ours:
            # Kill first, to avoid waiting for KillWait. scancel refuses a job that has just ended by itself, which is
            # fine: only nothing may run in the end.
            self.cluster.run("scancel", "--full", "--signal=KILL", *ours, check=False)
            self.cluster.run("scancel", *ours, check=False)
        busy = ["squeue", "--noheader", f"--nodelist={names}"]
        try:
            wait_until(lambda: not self.cluster.run(*busy).stdout.strip(), f"nodes {names} free again")
        finally:
            self._unlock()

    def _concerns(self, hostlists: Sequence[str]) -> bool:
        named: set[str] = set()
        for hostlist in hostlists:
            if not hostlist.startswith("("):
                named |= set(self.cluster.run("scontrol", "show", "hostnames", hostlist).stdout.split())
        return bool(named & set(self.nodes))

    def _unlock(self) -> None:
        for fd in self.locks:
            os.close(fd)


def _try_lock(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
