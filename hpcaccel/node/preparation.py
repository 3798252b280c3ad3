"""Steps on the nodes before the ranks start: import of the container's image, and staging of data to local disks."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.node.batch import default_signals, shell_code
from hpcaccel.node.environment.containers import cached_image, choose_runtime
from hpcaccel.node.environment.staging import STAGE_DIR, each_node, problem_in, stage_directory
from hpcaccel.node.failures import Failure, cause

__all__ = ["BeforeRanks", "Provision", "clean_snapshots", "clean_stage"]


class BeforeRanks:
    """A step before the ranks: one command, run on this node or through srun on all nodes.

    Has the interface of ``RankProcesses``. A request to stop ends the command with SIGTERM.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
        self._process = subprocess.Popen(
            command,
            env=dict(os.environ if env is None else env),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            preexec_fn=dying_with_us(signal.SIGTERM),
            start_new_session=True,
        )

    def poll(self) -> int | None:
        code = self._process.poll()
        return None if code is None else shell_code(code)

    @property
    def said(self) -> list[str]:
        """The lines of the command's standard output so far."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace").splitlines()

    def request_stop(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def dump(self) -> None:
        pass  # the command has no stacks to dump

    def wake(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


CLEAN_SECONDS = 60.0
"""Time limit for removing data from the nodes."""


class Provision:
    """Provides the image and the staged data for one attempt. Reuses an image that was already imported, and copies
    whose sources have not changed.

    Args:
        watch: called with each started step. Waits until the step ends, handles signals and requests in the meantime,
            and returns the step's exit code.
    """

    def __init__(self, run: RunDir, launch: LaunchSpec, *, watch: Callable[[BeforeRanks], int]) -> None:
        self.launch = launch
        """The launch spec. ``image()`` sets its container runtime to the chosen one."""
        self.env: dict[str, str] = {}
        """Environment variables for the ranks."""
        self._run = run
        self._watch = watch

    def image(self) -> Failure | None:
        """Import the container's image if it is missing. Returns the failure, or None."""
        container = self.launch.container
        if container is None:
            return None
        try:
            runtime = choose_runtime(container, local=self.launch.local)
        except RankEnvironmentError as error:
            return _setup(str(error))
        self.launch = dataclasses.replace(self.launch, container=dataclasses.replace(container, runtime=runtime))
        if not container.is_file and cached_image(container, runtime).exists():
            return None
        command = [sys.executable, str(self._run.node_program), "import-image", str(self._run.path), runtime]
        return self._step("image import", command)

    def stage(self, *, avoid: Sequence[str]) -> Failure | None:
        """Copy the data to the nodes. Returns the failure, or None."""
        if self.launch.stage is None:
            return None
        try:
            place = stage_directory(self.launch.stage, os.environ)
        except RankEnvironmentError as error:
            return _setup(str(error))
        self.env[STAGE_DIR] = str(place)
        arguments = ["stage", str(self._run.path), str(place)]
        return self._step("staging", each_node(self._run, self.launch, arguments, avoid=avoid))

    def _step(self, what: str, command: Sequence[str]) -> Failure | None:
        step = BeforeRanks(command)
        code = self._watch(step)
        if not code:
            return None
        detail, nodes = problem_in(step.said)
        if detail:
            return _setup(detail, nodes)
        return Failure(cause=cause("launch"), detail=f"{what} exited with code {code}; see {self._run.slurm_log}")


def _setup(detail: str, nodes: Sequence[str] = ()) -> Failure:
    return Failure(cause=cause("setup"), detail=detail[:1000], nodes=list(nodes))


def clean_snapshots(run: RunDir, launch: LaunchSpec, *, avoid: Sequence[str] = ()) -> str:
    """Remove the run's snapshots from the nodes' memory. Returns the problem as a sentence, or an empty string."""
    if not launch.snapshots:
        return ""
    problem = _clean_nodes(each_node(run, launch, ["forget-snapshots", str(run.path)], avoid=avoid))
    return problem and f"the snapshots in memory {problem}; the next job of this user on a node removes them"


def clean_stage(run: RunDir, launch: LaunchSpec, *, avoid: Sequence[str] = ()) -> str:
    """Remove the staged data, unless the spec keeps it. Returns the problem as a sentence, or an empty string."""
    if launch.stage is None or launch.stage.keep:
        return ""
    try:
        place = stage_directory(launch.stage, os.environ)
    except RankEnvironmentError:
        return ""  # without a directory nothing was staged
    problem = _clean_nodes(each_node(run, launch, ["unstage", str(place)], avoid=avoid))
    return problem and f"{place} {problem}"


def _clean_nodes(command: Sequence[str]) -> str:
    """Run a command that removes data. Returns the problem as the end of a sentence, or an empty string."""
    try:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, timeout=CLEAN_SECONDS, preexec_fn=default_signals, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return f"could not be removed within {CLEAN_SECONDS:g} s and may remain on the nodes"
    return "could not be removed from all nodes" if code else ""
