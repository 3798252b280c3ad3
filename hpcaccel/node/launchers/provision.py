"""What the nodes must have before the ranks start: the image of their container, and data on their own disks."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.node.environment.container_command import cached_image, choose_runtime
from hpcaccel.node.environment.stage_data import each_node, problem_in
from hpcaccel.node.environment.stage_path import STAGE_DIR, stage_directory
from hpcaccel.node.failures.causes import cause
from hpcaccel.node.failures.classify import Failure
from hpcaccel.node.launch_spec import Launch
from hpcaccel.node.launchers.node_step import BeforeRanks
from hpcaccel.node.launchers.start_ranks import default_signals

__all__ = ["Provision", "clean_stage"]

CLEAN_SECONDS = 60.0


class Provision:
    """Of one allocation. Everything is looked at anew for each attempt, and what is there is not made again.

    Args:
        watch: waits for a step to end and hears meanwhile who wants the job to stop; its exit code.
    """

    def __init__(self, run: RunDir, launch: Launch, *, watch: Callable[[BeforeRanks], int]) -> None:
        self.launch = launch
        """As read, with the container's runtime chosen once ``image`` has been called."""
        self.env: dict[str, str] = {}
        """What the ranks are told."""
        self._run = run
        self._watch = watch

    def image(self) -> Failure | None:
        """See to it that the container's image is there; what went wrong, if it did."""
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
        return self._step("the import of the image", command)

    def stage(self, *, avoid: Sequence[str]) -> Failure | None:
        """Bring the data to the nodes; what went wrong, if it did."""
        if self.launch.stage is None:
            return None
        try:
            place = stage_directory(self.launch.stage, os.environ)
        except RankEnvironmentError as error:
            return _setup(str(error))
        self.env[STAGE_DIR] = str(place)
        words = ["stage", str(self._run.path), str(place)]
        return self._step("staging", each_node(self._run, self.launch, words, avoid=avoid))

    def _step(self, what: str, command: Sequence[str]) -> Failure | None:
        step = BeforeRanks(command)
        code = self._watch(step)
        if not code:
            return None
        detail, nodes = problem_in(step.said)
        if detail:
            return _setup(detail, nodes)
        return Failure(cause=cause("launch"), detail=f"{what} ended with code {code}; see {self._run.slurm_log}")


def _setup(detail: str, nodes: Sequence[str] = ()) -> Failure:
    return Failure(cause=cause("setup"), detail=detail[:1000], nodes=list(nodes))


def clean_stage(run: RunDir, launch: Launch, *, avoid: Sequence[str] = ()) -> str:
    """Remove what was staged, unless it is to be kept; what went wrong, in a sentence."""
    if launch.stage is None or launch.stage.keep:
        return ""
    try:
        place = stage_directory(launch.stage, os.environ)
    except RankEnvironmentError:
        return ""  # nothing could be staged either
    command = each_node(run, launch, ["unstage", str(place)], avoid=avoid)
    try:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, timeout=CLEAN_SECONDS, preexec_fn=default_signals, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return f"{place} could not be removed within {CLEAN_SECONDS:g} s, and is left on the nodes"
    return f"{place} could not be removed from all nodes" if code else ""
