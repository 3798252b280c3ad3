"""The table of failure causes: how each cause is recognised, and what follows (docs/failures.md shows the rows).

A failed attempt leaves many traces: if one rank fails, the others report a lost peer, and a broken GPU raises an
exception like any other fault. Of all rows that match a trace, the first one in the table is the cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["CAUSES", "Cause", "Failure", "Follows", "cause"]

Follows = Literal[
    "restart",  # restart the ranks in the same allocation; requeue when no restarts are left
    "requeue",  # give the nodes back and requeue the job
    "exclude",  # exclude the blamed nodes; restart on the others if these are enough, else requeue
    "end",  # a retry would fail in the same way
]


@dataclass(frozen=True, kw_only=True)
class Cause:
    name: str
    """Written to the ledger as ``error_class``."""
    meaning: str
    follows: Follows
    advice: str = ""
    """What the user can do or check; empty if nothing is needed."""
    errors: tuple[str, ...] = ()
    """Patterns for a rank's last exception, as ``Type: message``, or for an exception from which it was raised."""
    lines: tuple[str, ...] = ()
    """Patterns for any line in a rank's or the batch step's log. A group called ``node`` matches the node to blame."""
    ends: tuple[str, ...] = ()
    """Patterns for a rank's end as srun reports it: ``Killed``, ``Exited with exit code 2``."""
    last_only: bool = False
    """``errors`` apply only to the last exception: programs often catch this type of exception and continue."""
    innocent: bool = False
    """Whether the run is not at fault: an attempt whose node is excluded for this cause does not count for the caps."""
    never_began: bool = False
    """Whether the ranks were not even started. Unless ``follows`` is ``restart``, the allocation is then unusable."""
    elsewhere: bool = False
    """Blame only the node named in the line, never the node of the rank whose log contains the line."""
    in_run: bool = False
    """``errors`` apply only if the exception names the run directory or its checkpoints."""

    def in_error(self, text: str) -> bool:
        return any(re.search(pattern, text) for pattern in self.errors)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The cause of a failure, with the text from which it was recognised."""

    cause: Cause
    detail: str
    nodes: list[str] = field(default_factory=list)
    """Nodes to blame, if the cause is a fault of nodes."""
    rank: int | None = None
    """The rank that failed first; None if no rank is at fault, or if only consequences of its failure are known."""


_STEPD = (
    r"^(?:slurmstepd(?:-\S+)?: "  # up to 26.05
    r"|\[\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)?\] "  # since then, by LogTimeFormat: iso8601, rfc5424 …
    r"|\[[A-Z][a-z]{2} [ \d]\d [\d:.]+\] )"  # … or short
)
"""Prefix of the lines that slurmstepd writes to a rank's or a job's output."""
_BROKEN_GPU = "Report the node to the cluster's staff: its GPU needs a reset or a repair."

CAUSES = (
    # -- found by the batch step -----------------------------------------------------------------------------------
    Cause(
        name="setup",
        meaning="a set-up line, the image import or the staging failed, and no rank was started",
        follows="end",
        advice="The output is in slurm.log. Run a failed set-up line by hand on a node of the cluster.",
    ),
    Cause(
        name="supervisor",
        meaning="the process that supervises the ranks was repeatedly killed or could not be started",
        follows="requeue",
        advice="The usual cause is that the first node ran out of memory: raise slurm.mem. slurm.log names the signal.",
    ),
    Cause(
        name="dependency",
        meaning="a run in `after` did not end as `after` requires, so this run cannot start",
        follows="end",
        advice="Make sure that the other run ends as required, then `hpcaccel resume` this one; or submit it again "
        "with `afterany:` or without that run in `after`.",
    ),
    Cause(
        name="component",
        meaning="a program that runs beside the ranks (`components`) exited with an error",
        follows="restart",
        advice="`hpcaccel logs RUN --rank NAME` shows the component's output.",
    ),
    Cause(
        name="preflight",
        meaning="a node failed the checks before the start",
        follows="exclude",
        innocent=True,
        advice="Report the problem to the cluster's staff; the ledger names the node and the problem.",
    ),
    Cause(
        name="network",
        meaning="the all-reduce over all ranks before the start failed, and no single node is to blame",
        follows="requeue",
        advice="Check for a firewall between the nodes, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
    ),
    Cause(
        name="hang",
        meaning="the ranks stopped making progress and were killed",
        follows="restart",
        advice="`hpcaccel stacks RUN` shows where the ranks were: find the line where the hanging rank is stuck.",
    ),
    # -- hardware and nodes ----------------------------------------------------------------------------------------
    Cause(
        name="gpu_lost",
        meaning="a GPU fell off the bus or no longer responds",
        follows="exclude",
        innocent=True,
        advice=_BROKEN_GPU,
        errors=(r"GPU is lost", r"[Uu]nable to determine the device handle for GPU", r"NVML_ERROR_GPU_IS_LOST"),
        lines=(r"NVRM: .*fallen off the bus", r"NVRM: Xid .*: 79,", r"^Unable to determine the device handle for GPU"),
    ),
    Cause(
        name="gpu_error",
        meaning="a GPU reported a hardware fault: Xid, ECC or NVLink",
        follows="exclude",
        innocent=True,
        advice=_BROKEN_GPU,
        errors=(
            r"uncorrectable (?:ECC|NVLink) error",
            r"CUDA error: hardware stack error",
            r"over nvlink or a hardware error",
        ),
        lines=(r"NVRM: Xid .*: (?:48|62|64|74|92|94|95|119|120|140|143),", r"CUDA warning: uncorrectable"),
    ),
    Cause(
        name="gpu_unavailable",
        meaning="the node's GPUs cannot be used, because of the driver, the fabric manager or another program",
        follows="exclude",
        advice="Check `nvidia-smi` on that node, and whether its driver is too old for the program's CUDA version.",
        errors=(
            r"CUDA-capable devices?(?:\(s\))? (?:is/are|are) busy or unavailable",
            r"no CUDA-capable device is detected",
            r"CUDA error: (?:system not yet initialized|initialization error|system has unsupported display driver)",
            r"CUDA driver initialization failed",
            r"Error 80[234]: system",
        ),
    ),
    Cause(
        name="node_failure",
        meaning="Slurm reported a node failure",
        follows="exclude",
        innocent=True,
        elsewhere=True,
        lines=(
            r"^srun: error: Node failure on (?P<node>\S+)",
            # The node in this line is the live one that writes it, not the failed one.
            _STEPD + r"error: \*\*\* \S+ \S+ ON \S+ CANCELLED AT \S+ DUE TO NODE FAILURE",
        ),
    ),
    Cause(
        name="step_memory",
        meaning="Slurm did not create the step of the ranks: an earlier step of the job still held its memory",
        follows="restart",
        never_began=True,
        advice="If it happens each time, `srun.extra` requests more memory than the job has.",
        lines=(r"^srun: error: Unable to create step for job \S+: Memory required by task is not available",),
    ),
    Cause(
        name="launch",
        meaning="Slurm could not start the ranks on a node",
        follows="exclude",
        never_began=True,
        advice="The messages of srun are in slurm.log.",
        lines=(
            r"^srun: error: Task launch for \S+ failed on node (?P<node>[^\s:]+)",
            r"^srun: error: (?:Unable to create step|Application launch failed|Timed out waiting for job step)",
        ),
    ),
    Cause(
        name="container",
        meaning="a rank's container could not be created or started",
        follows="restart",
        advice="The rank's log contains the messages of pyxis and enroot. Check the image and the node's free space "
        "(ENROOT_DATA_PATH).",
        # If the ranks run in enroot without pyxis, ``classify`` finds enroot's own messages.
        lines=(_STEPD + r"error: pyxis: (?:failed to|couldn't|could not|unable to|unexpected) ",),
    ),
    # -- Slurm's own decisions; the job's status in Slurm takes precedence over these log lines --------------------
    Cause(
        name="preempted",
        meaning="the job was preempted",
        follows="requeue",
        lines=(_STEPD + r"error: \*\*\* .* CANCELLED AT \S+ DUE TO PREEMPTION",),
    ),
    Cause(
        name="time_limit",
        meaning="the job reached its time limit before the ranks had exited",
        follows="requeue",
        advice="Raise resilience.warning_seconds to more than twice the duration of a save.",
        lines=(_STEPD + r"error: \*\*\* .* CANCELLED AT \S+ DUE TO TIME LIMIT",),
    ),
    Cause(
        name="cancelled",
        meaning="the job was cancelled",
        follows="end",
        lines=(_STEPD + r"error: \*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ (?:DUE to SIGNAL \w+ )?\*\*\*",),
    ),
    # -- memory and disks ------------------------------------------------------------------------------------------
    Cause(
        name="host_out_of_memory",
        meaning="the node, or the job's share of its memory, ran out of memory",
        follows="restart",
        advice="Raise slurm.mem, use fewer data-loader workers, or keep less in memory on each rank.",
        errors=(
            r"^(?:\w+\.)*MemoryError\b",
            r"DefaultCPUAllocator: (?:can't|not enough) ",
            r"Cannot allocate memory",
            r"DataLoader worker .*killed by signal: Killed",
        ),
        lines=(
            _STEPD + r"error: .*\boom[_-]kill",
            _STEPD + r".*[Ee]xceeded (?:job|step) memory limit",
            r"Memory cgroup out of memory: Kill",
        ),
        ends=(r"Out Of Memory",),
    ),
    Cause(
        name="cuda_out_of_memory",
        meaning="a GPU ran out of memory",
        follows="restart",
        advice="Lower the batch size, use find_executable_batch_size, accumulate gradients, shard the model "
        "(runtime.strategy: fsdp) or set runtime.activation_checkpointing.",
        errors=(
            r"^(?:\w+\.)*OutOfMemoryError\b",
            r"CUDA (?:error: )?out of memory",
            r"C(?:UBLAS|UDNN)_STATUS_ALLOC_FAILED",
        ),
    ),
    Cause(
        name="shared_memory",
        meaning="data-loader workers ran out of shared memory (/dev/shm)",
        follows="restart",
        advice="Lower num_workers or the batch size, or give the container a larger /dev/shm.",
        errors=(r"out of shared memory", r"unable to (?:mmap|open shared memory|allocate shared memory)"),
    ),
    Cause(
        name="quota",
        meaning="the quota of the user or the project on a file system is used up",
        follows="restart",
        advice="Delete files or request a larger quota, then `hpcaccel resume`; a lower checkpoint.keep saves space.",
        errors=(r"Disk quota exceeded", r"\[Errno 122\]"),
        lines=(_STEPD + r"error: .*Disk quota exceeded",),
    ),
    Cause(
        name="disk_full",
        meaning="a file system is full",
        follows="restart",
        advice="Free some space, or choose another directory with --runs-dir; a lower checkpoint.keep saves space.",
        errors=(r"No space left on device", r"\[Errno 28\]"),
        lines=(_STEPD + r"error: .*No space left on device",),
    ),
    Cause(
        name="unwritable",
        meaning="the run directory or its checkpoints are not writable: permissions, an immutable directory or a "
        "read-only file system",
        follows="restart",
        advice="Check the directory with `ls -ld`, `lsattr -d` and `findmnt -T`, make it writable, then run "
        "`hpcaccel resume`.",
        errors=(
            r"(?:checkpoints?|step_\d+)\b.*(?:Operation not permitted|Permission denied|Read-only file system)",
            r"(?:Operation not permitted|Permission denied|Read-only file system).*/checkpoints/",
        ),
        in_run=True,
    ),
    Cause(
        name="run_directory_gone",
        meaning="a rank did not find the run directory; if the batch step does not find it either, the job ends",
        follows="restart",
        advice="Move the run directory back to its old path, then `hpcaccel resume`: it is not created again.",
        errors=(r"the run directory (?:is not there any more|is no longer there|no longer exists|is gone)",),
    ),
    Cause(
        name="io_error",
        meaning="a file system reported an I/O error",
        follows="restart",
        advice="If it happens again, report the path and the node to the cluster's staff.",
        errors=(
            r"\[Errno (?:5|30|107|116|121)\]",
            r"Input/output error|Read-only file system|Stale file handle|Transport endpoint is not connected",
        ),
    ),
    # -- the user's program ----------------------------------------------------------------------------------------
    Cause(
        name="user_mistake",
        meaning="the program exited with code 2: a wrong argument, or an error in the spec",
        follows="end",
        advice="Fix the error that the rank's log reports, and submit again.",
        ends=(r"Exited with exit code 2$",),
    ),
    Cause(
        name="import_error",
        meaning="the program imports a module that its environment does not have",
        follows="end",
        last_only=True,
        advice="Install it in the environment that `environment` names, or add its directory to the copied code.",
        errors=(r"^(?:ModuleNotFoundError|ImportError)\b",),
    ),
    Cause(
        name="not_finite",
        meaning="the loss or a gradient became NaN or infinite",
        follows="restart",
        advice="Lower the learning rate, clip gradients, or check the data of the step that the log names.",
        errors=(
            r"^(?:\w+\.)*FloatingPointError\b",
            r"returned nan values in its",
            r"(?i)\b(?:loss|grad\w*)\b.{0,60}\b(?:nan|inf|infinite|infinity|non-?finite|not (?:a )?finite)\b",
        ),
    ),
    Cause(
        name="cuda_error",
        meaning="a CUDA kernel failed",
        follows="restart",
        advice="Often an index out of range: run once with CUDA_LAUNCH_BLOCKING=1 to see the failing line.",
        errors=(r"CUDA error:", r"CU(?:BLAS|DNN|SPARSE)_STATUS_", r"^cuda\w*Error\b"),
    ),
    Cause(
        name="left",
        meaning="a rank reached the end of the program while other ranks were still in the training loop",
        follows="restart",
        advice="All ranks must do the same number of steps: check the line that the log names.",
        lines=(r"^hpcaccel: rank \d+ has reached the end of the program.*this rank (?:waited|was waiting) for it",),
        elsewhere=True,
    ),
    Cause(
        name="exception",
        meaning="the program raised an exception",
        follows="restart",
        advice="`hpcaccel logs RUN --rank N` shows the traceback of rank N.",
    ),
    Cause(
        name="crashed",
        meaning="the program crashed: SIGSEGV, SIGBUS, SIGABRT, SIGILL or SIGFPE",
        follows="restart",
        advice="The rank's log contains the stack. The fault is in native code: check the versions of its libraries.",
        lines=(r"^Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction|Floating-point)",),
        ends=(r"Segmentation fault", r"Bus error", r"Aborted", r"Illegal instruction", r"Floating point exception"),
    ),
    Cause(
        name="killed",
        meaning="a rank was killed from outside, and no log shows why",
        follows="restart",
        advice="Often the node ran out of memory: raise slurm.mem if it happens again.",
        ends=(r"Killed", r"Terminated", r"Hangup", r"Interrupt", r"User defined signal", r"Signal \d+"),
    ),
    Cause(
        name="exit",
        meaning="the program exited with an error code, and its log shows no known cause",
        follows="restart",
        advice="Check the last lines of the rank's log.",
        ends=(r"Exited with exit code",),
    ),
    # -- consequences of another rank's end; a cause only if no rank shows any other -------------------------------
    Cause(
        name="rendezvous",
        meaning="the ranks could not connect to each other: a port in use, an unknown host name, a missing rank",
        follows="restart",
        advice="Each start uses a new port. If it happens again, set GLOO_SOCKET_IFNAME to the network interface.",
        errors=(
            r"EADDRINUSE|[Aa]ddress already in use",
            r"DistNetworkError|DistStoreError|RendezvousConnectionError|RendezvousTimeoutError",
            r"waiting for clients",
            r"client socket has (?:failed to connect|timed out)",
            r"RankEnvironmentError: rank.* (?:could not \w+ the|did not reach|no(?:t found)? rank 0|waited)",
        ),
    ),
    Cause(
        name="nccl_timeout",
        meaning="a collective between GPUs timed out, or NCCL lost a peer",
        follows="restart",
        advice="If no rank was slow or missing, run with resilience.preflight: full, which tests the network first.",
        errors=(r"DistBackendError", r"(?i)\bnccl"),
        lines=(r"Watchdog caught collective operation timeout", r"NCCL watchdog thread terminated with exception"),
    ),
    Cause(
        name="gloo_timeout",
        meaning="a collective between processes timed out, or the connection to a peer was lost",
        follows="restart",
        advice="Check the log of the missing rank. runtime.timeout_seconds sets how long the other ranks wait for it.",
        errors=(
            r"\bRankFailed\b",
            r"gloo|ProcessGroup",
            r"Connection (?:closed|reset|refused)|Broken pipe|by peer",
            r"Timed out waiting \d+ms",
        ),
    ),
)

_BY_NAME = {row.name: row for row in CAUSES}


def cause(name: str) -> Cause:
    """The row with this name. For an unknown name, such as one from another version of hpcaccel, the row ``exit``."""
    return _BY_NAME.get(name, _BY_NAME["exit"])
