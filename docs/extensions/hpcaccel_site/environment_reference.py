"""The environment variables whose names begin with ``HPCACCEL_``: who sets each, who reads it, its default.

``tests/test_site_reference.py`` fails if the code has a variable that is missing here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from hpcaccel_site.markdown import code, plain, table

__all__ = ["VARIABLES", "Variable", "environment_tables", "variables_in_code"]

ROOT = Path(__file__).resolve().parents[3]
_SOURCES = ("hpcaccel", "templates", "docker", "jobs")
_SUFFIXES = ("", ".py", ".j2", ".sh", ".yaml", ".yml", ".md")
_NAME = re.compile(r"\bHPCACCEL_[A-Z0-9]+(?:_[A-Z0-9]+)*\b")


class Variable(NamedTuple):
    """One environment variable."""

    name: str
    set_by: str
    read_by: str
    default: str
    meaning: str


USER = (
    Variable("HPCACCEL_RUNS_DIR", "you", "submit, sweep start", "the profile's `runs_dir`, else `./runs`",
             "Folder in which run directories are created. `--runs-dir` takes precedence."),
    Variable("HPCACCEL_LOG_LEVEL", "you, `environment.env`", "ranks, batch step", "`info`",
             "Lowest level that is logged: a name such as `debug`, or a number."),
    Variable("HPCACCEL_QUEUE_SECONDS", "you", "all commands", "60",
             "Seconds for which a result of squeue is valid for all of your processes."),
    Variable("HPCACCEL_SERVICE_TOKEN", "you", "`hpcaccel.Client`, `hpcaccel mcp`", "the token in the link",
             "Token of a running `hpcaccel serve`."),
    Variable("HPCACCEL_METRICS", "the batch step; outside of a run, you", "programs, `hpcaccel.log`",
             "none: nothing is written",
             "File to which a program appends metrics as JSON lines. On rank 0 of a run a file of the attempt, on "
             "other ranks `/dev/null`."),
    Variable("HPCACCEL_STRATEGY", "you, `hpcaccel launch`", "`Accelerator`", "`ddp`",
             "Outside of a run: the strategy (`ddp`, `fsdp`, `deepspeed`) if the script names none."),
    Variable("HPCACCEL_USE_CPU", "you, `environment.env`, `hpcaccel launch`", "`Accelerator`", "no",
             "`1`: train on CPUs although there is a GPU."),
    Variable("HPCACCEL_ALONE", "you, `environment.env`", "ranks", "no",
             "`1`: each task of the step trains alone, on purpose."),
    Variable("HPCACCEL_GPUS_PER_TASK", "you, `environment.env`", "ranks", "one GPU per task",
             "`all`: one process uses all GPUs that its task sees."),
    Variable("HPCACCEL_SAMPLE_SECONDS", "`environment.env`", "the sampler of each node", "15",
             "Seconds between two samples of GPUs, CPUs and memory; 0: no samples."),
    Variable("HPCACCEL_DEBUG", "you, `hpcaccel launch --debug`", "ranks", "no",
             "`1`: outside of a run, compare shapes and types between ranks before each collective with GPU tensors "
             "too, as `runtime.debug` does in a run."),
    Variable("HPCACCEL_PATIENCE_SECONDS", "you", "ranks", "5",
             "Seconds that a rank waits in a collective call before it looks where the other ranks are."),
    Variable("HPCACCEL_HEARTBEAT_SECONDS", "you", "ranks", "10", "Seconds between two heartbeats of a rank."),
)  # fmt: skip
"""Variables that users set."""

PROGRAM = (
    Variable("HPCACCEL_RUN_DIR", "the batch step", "ranks", "not set outside of a run", "The run directory."),
    Variable("HPCACCEL_ATTEMPT", "the batch step", "ranks", "not set outside of a run",
             "Number of the attempt, from 1."),
    Variable("HPCACCEL_DEADLINE", "the batch step", "programs", "not set without a time limit",
             "End of the job, in seconds since the epoch."),
    Variable("HPCACCEL_STAGE_DIR", "the batch step", "programs", "not set without `stage`",
             "Folder on the node's own disk with the copies that `stage` has made."),
    Variable("HPCACCEL_NODES", "the batch step", "ranks and components", "not set without `components`",
             "Nodes of the ranks, separated by commas. `HPCACCEL_NODES_NAME`: those of the component `name`."),
    Variable("HPCACCEL_COMPONENT", "the batch step", "components", "not set in ranks", "Name of the component."),
    Variable("HPCACCEL_COMPONENT_PROCESS", "the batch step", "components", "the task's number in its step",
             "Number of the component's process, from 0."),
    Variable("HPCACCEL_PROTOCOL", "the batch step", "ranks", "not set outside of a run",
             "Version of the protocol between batch step and ranks."),
)  # fmt: skip
"""Variables that the programs of a run can read."""

INTERNAL = (
    Variable("HPCACCEL_LOCAL_JOB", "local backend", "batch step", "", "Job id of a job without Slurm."),
    Variable("HPCACCEL_RESTART_COUNT", "batch step", "batch step", "0",
             "Number of requeues of a job of the local backend."),
    Variable("HPCACCEL_BATCH", "batch step", "batch step", "",
             "Mark of all descendants of a batch step, by which leftovers are found and ended."),
    Variable("HPCACCEL_KILLED", "batch step", "supervisor", "", "The signal that killed the supervisor before."),
    Variable("HPCACCEL_EARLY_SIGNALS", "batch script", "batch step", "",
             "Signals that arrived before the batch step had started."),
    Variable("HPCACCEL_EXPEDITE", "batch script", "batch step", "",
             "Set if the job was submitted with `resilience.requeue: expedite`."),
    Variable("HPCACCEL_RESUME_ARGS", "supervisor", "the rank's shim", "", "Words of `entrypoint.resume_args` (JSON)."),
    Variable("HPCACCEL_COMPONENT_JOB", "supervisor", "the component's shim", "", "Slurm's job id of the component."),
    Variable("HPCACCEL_PREFLIGHT_WHERE", "supervisor", "checks before the start", "",
             "Address at which the batch step listens for the results of the checks."),
    Variable("HPCACCEL_PREFLIGHT_TOKEN", "supervisor", "checks before the start", "",
             "Token that each node sends with them."),
    Variable("HPCACCEL_WORKER_JOB", "sweep worker", "a trial's supervisor", "",
             "File with the last known status of the worker's job."),
    Variable("HPCACCEL_WORKER_END", "sweep worker", "a trial's supervisor", "",
             "End of a local worker's time limit, in seconds since the epoch."),
    Variable("HPCACCEL_KILL_WAIT", "sweep worker", "a trial's supervisor", "", "The cluster's KillWait in seconds."),
    Variable("HPCACCEL_PROCTRACK", "sweep worker", "a trial's supervisor", "", "The cluster's ProctrackType."),
    Variable("HPCACCEL_NODES_CHECKED", "sweep worker", "a trial's supervisor", "",
             "Set if a trial has ended well in this allocation: its nodes need no further check."),
    Variable("HPCACCEL_SLOT", "sweep worker", "ranks of a trial", "",
             "The trial's share of the worker's GPUs (`sweep.pack`), as `number/of`."),
    Variable("HPCACCEL_WARM", "supervisor", "the rank's shim", "",
             "With `resilience.warm_restart`: how the parent process of a rank reaches the supervisor (JSON)."),
    Variable("HPCACCEL_LAUNCH_MARK", "`hpcaccel launch`", "its guard", "",
             "Mark of ranks and their children, by which leftovers are found and ended."),
    Variable("HPCACCEL_PROFILES", "a command from another machine", "all commands", "",
             "Folder of cluster profiles in place of the user's own."),
    Variable("HPCACCEL_TERMINAL_COLUMNS", "a command from another machine", "tables", "",
             "Width of the user's terminal in characters."),
    Variable("HPCACCEL_SENT_COMMIT", "a command from another machine", "submit", "",
             "Git commit of the code that was sent; a trailing `+` stands for uncommitted changes."),
    Variable("HPCACCEL_SENT_FROM", "a command from another machine", "submit", "",
             "Where the run was submitted: `user@host:/directory`."),
)  # fmt: skip
"""Variables between hpcaccel's own processes."""

DEVELOPMENT = (
    Variable("HPCACCEL_TEST_PYXIS", "you", "`make faults`", "no test with pyxis", "Prefix of a pyxis that was built."),
)  # fmt: skip
"""Variables of the development cluster and the tests."""

VARIABLES = (*USER, *PROGRAM, *INTERNAL, *DEVELOPMENT)

_EXAMPLES = ("HPCACCEL_NODES_DATA", "HPCACCEL_NODES_VLLM", "HPCACCEL_NODES_NAME")
"""Names in examples: ``HPCACCEL_NODES_`` and the name of a component."""


def variables_in_code() -> dict[str, Path]:
    """Each variable that the code names, with one of the files."""
    found: dict[str, Path] = {}
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in _SUFFIXES:
                found |= dict.fromkeys(_NAME.findall(path.read_text(encoding="utf-8")), path)
    return {name: path for name, path in found.items() if name not in _EXAMPLES}


def environment_tables() -> str:
    """Markdown: three tables, by who uses the variables."""
    groups = {
        "Variables that you set": USER,
        "Variables that your program can read": PROGRAM,
        "Variables between hpcaccel's own processes": INTERNAL,
        "Variables of the tests": DEVELOPMENT,
    }
    head = ("variable", "set by", "read by", "default", "meaning")
    parts = []
    for title, variables in groups.items():
        rows = [
            (f"[{code(one.name)}]{{#{one.name.lower().replace('_', '-')}}}", *map(plain, one[1:])) for one in variables
        ]
        parts.append(f"## {title}\n\n{table(head, rows)}")
    return "\n".join(parts)
