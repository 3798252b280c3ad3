"""What can go wrong, how it is recognised, and what follows: one row for each cause.

The order of the rows is the order of meaning. A run leaves many traces: one rank's failure makes the others lose
their peer, and a broken GPU ends in an exception like any other. The row that stands first among all traces is the
cause. docs/failures.md shows this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["CAUSES", "Cause", "Follows", "cause"]

Follows = Literal[
    "restart",  # the ranks start again in the same allocation; when that is used up, requeue
    "requeue",  # give the nodes back, and come back through the queue
    "exclude",  # requeue, and keep away from the nodes that the evidence names
    "end",  # trying again changes nothing
]


@dataclass(frozen=True, kw_only=True)
class Cause:
    name: str
    """Stands in the ledger as ``error_class``."""
    meaning: str
    follows: Follows
    advice: str
    """One sentence for the user, empty where nothing is to be done."""
    errors: tuple[str, ...] = ()
    """Patterns of a rank's last exception, ``Type: message``, or of one that it was raised from."""
    lines: tuple[str, ...] = ()
    """Patterns of any line in a rank's log or in the batch step's. Words that programs do not print by themselves. A
    group ``node`` names the node to blame."""
    ends: tuple[str, ...] = ()
    """How a rank ended, in srun's words: ``Killed``, ``Exited with exit code 2``."""
    last_only: bool = False
    """The patterns count for the last exception alone: programs try something and do without it."""
    innocent: bool = False
    """The run has no part in it: an attempt that made us exclude a node does not count towards its caps."""
    never_began: bool = False
    """The ranks were not started: of what they would have done nothing is known, and the allocation is of no use."""
    elsewhere: bool = False
    """Blame only the node named in the line, never the node of the rank whose log holds it."""
    in_run: bool = False
    """The patterns of errors count where the error names a path in the run directory."""
    echo: bool = False
    """Another rank's failure looks like this, too."""

    def in_error(self, text: str) -> bool:
        return any(re.search(pattern, text) for pattern in self.errors)

    def in_line(self, text: str) -> re.Match[str] | None:
        return next(filter(None, (re.search(pattern, text) for pattern in self.lines)), None)

    def in_end(self, text: str) -> bool:
        return any(re.match(pattern, text) for pattern in self.ends)


_STEPD = (
    r"^(?:slurmstepd(?:-\S+)?: "  # up to 26.05
    r"|\[\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)?\] "  # since then, as LogTimeFormat has it: iso8601, rfc5424 …
    r"|\[[A-Z][a-z]{2} [ \d]\d [\d:.]+\] )"  # … or short
)
"""How slurmstepd begins the lines that it writes to a rank's or a job's output."""
_BROKEN_GPU = "Tell the cluster's staff: the node's GPU needs a reset or a repair."

CAUSES = (
    # -- the batch step's own word ---------------------------------------------------------------------------------
    Cause(
        name="setup",
        meaning="a line of the set-up failed, and no rank was started",
        follows="end",
        advice="Run the line by hand on a node of the cluster; slurm.log holds its output.",
    ),
    Cause(
        name="supervisor",
        meaning="the process that watches the ranks was killed again and again as soon as it had started",
        follows="requeue",
        advice="Often the job's memory is used up on its first node: raise slurm.mem. slurm.log names the signal.",
    ),
    Cause(
        name="dependency",
        meaning="a run that it was to wait for has ended otherwise than `after` asks, so that it cannot start",
        follows="end",
        advice="Bring the other run to the end that is asked for, then `hpcaccel resume` this one; or submit it anew "
        "with `afterany:` or without that run in `after`.",
    ),
    Cause(
        name="component",
        meaning="a program beside the ranks (`components`) ended with an error",
        follows="restart",
        advice="`hpcaccel logs RUN --rank NAME` shows what the component printed.",
    ),
    Cause(
        name="preflight",
        meaning="a node did not pass the checks before the start",
        follows="exclude",
        innocent=True,
        advice="Tell the cluster's staff what was found; the ledger names node and finding.",
    ),
    Cause(
        name="network",
        meaning="the nodes could not compute together before the start, and no single one is to blame",
        follows="requeue",
        advice="GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network to use; is a firewall between the nodes?",
    ),
    Cause(
        name="hang",
        meaning="a rank took no step any more, and the ranks were ended",
        follows="restart",
        advice="The attempt's folder holds the stacks of all ranks: look where the silent one stands.",
    ),
    # -- the machines ----------------------------------------------------------------------------------------------
    Cause(
        name="gpu_lost",
        meaning="a GPU fell off its bus or does not answer any more",
        follows="exclude",
        innocent=True,
        advice=_BROKEN_GPU,
        errors=(r"GPU is lost", r"[Uu]nable to determine the device handle for GPU", r"NVML_ERROR_GPU_IS_LOST"),
        lines=(r"NVRM: .*fallen off the bus", r"NVRM: Xid .*: 79,", r"^Unable to determine the device handle for GPU"),
    ),
    Cause(
        name="gpu_error",
        meaning="a GPU reports a fault of its own: Xid, ECC, NVLink",
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
        meaning="the node's GPUs cannot be used: driver, fabric manager, or another program on them",
        follows="exclude",
        advice="Compare with `nvidia-smi` on that node; is the program's CUDA newer than its driver?",
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
        meaning="Slurm lost a node",
        follows="exclude",
        innocent=True,
        elsewhere=True,
        advice="",
        lines=(
            r"^srun: error: Node failure on (?P<node>\S+)",
            # The node in this line is the one that lives and writes it.
            _STEPD + r"error: \*\*\* \S+ \S+ ON \S+ CANCELLED AT \S+ DUE TO NODE FAILURE",
        ),
    ),
    Cause(
        name="launch",
        meaning="Slurm could not start the ranks on a node",
        follows="exclude",
        never_began=True,
        advice="slurm.log holds srun's words.",
        lines=(
            r"^srun: error: Task launch for \S+ failed on node (?P<node>[^\s:]+)",
            r"^srun: error: (?:Unable to create step|Application launch failed|Timed out waiting for job step)",
        ),
    ),
    Cause(
        name="container",
        meaning="a rank's container could not be made or started",
        follows="restart",
        advice="The rank's log holds the words of pyxis and enroot: is the image whole, and is there room for it on "
        "the node (ENROOT_DATA_PATH)?",
        lines=(
            # enroot's words without pyxis are looked for where a run has a container, see ``classify``
            _STEPD + r"error: pyxis: (?:failed to|couldn't|could not|unable to|unexpected) ",
        ),
    ),
    # -- Slurm's own decisions; where it can be asked, its answer counts before any log ----------------------------
    Cause(
        name="preempted",
        meaning="the cluster wanted the nodes",
        follows="requeue",
        advice="",
        lines=(_STEPD + r"error: \*\*\* .* CANCELLED AT \S+ DUE TO PREEMPTION",),
    ),
    Cause(
        name="time_limit",
        meaning="the job's time was over before the ranks had left",
        follows="requeue",
        advice="Raise resilience.warning_seconds to more than twice the time of a save.",
        lines=(_STEPD + r"error: \*\*\* .* CANCELLED AT \S+ DUE TO TIME LIMIT",),
    ),
    Cause(
        name="cancelled",
        meaning="somebody cancelled the job",
        follows="end",
        advice="",
        lines=(_STEPD + r"error: \*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ (?:DUE to SIGNAL \w+ )?\*\*\*",),
    ),
    # -- memory and disks ------------------------------------------------------------------------------------------
    Cause(
        name="host_out_of_memory",
        meaning="the node's memory, or the job's share of it, was used up",
        follows="restart",
        advice="Raise slurm.mem, or lower the number of data-loader workers and what each rank keeps in memory.",
        errors=(
            r"^(?:\w+\.)*MemoryError\b",
            r"DefaultCPUAllocator: (?:can't|not enough) ",
            r"Cannot allocate memory",
            r"DataLoader worker .*killed by signal: Killed",
        ),
        lines=(
            _STEPD + r"error: Detected \d+ oom[_-]kill event",
            _STEPD + r"error: .*\boom[_-]kill",
            _STEPD + r".*[Ee]xceeded (?:job|step) memory limit",
            r"Memory cgroup out of memory: Kill",
        ),
        ends=(r"Out Of Memory",),
    ),
    Cause(
        name="cuda_out_of_memory",
        meaning="a GPU's memory was used up",
        follows="restart",
        advice="Lower the batch size, use find_executable_batch_size, accumulate gradients, shard the model "
        "(runtime.strategy: fsdp) or set runtime.activation_checkpointing.",
        errors=(
            r"^(?:\w+\.)*OutOfMemoryError\b",
            r"CUDA out of memory",
            r"CUDA error: out of memory",
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
        meaning="the user's or the project's quota of a file system is used up",
        follows="restart",
        advice="Delete files or ask for more quota, then `hpcaccel resume`; checkpoint.keep bounds what a run keeps.",
        errors=(r"Disk quota exceeded", r"\[Errno 122\]"),
        lines=(_STEPD + r"error: .*Disk quota exceeded",),
    ),
    Cause(
        name="disk_full",
        meaning="a file system is full",
        follows="restart",
        advice="Free space, or choose another place with --runs-dir; checkpoint.keep bounds what a run keeps.",
        errors=(r"No space left on device", r"\[Errno 28\]"),
        lines=(_STEPD + r"error: .*No space left on device",),
    ),
    Cause(
        name="unwritable",
        meaning="the run directory, or its checkpoints, may not be written: rights, an immutable folder, a read-only "
        "file system",
        follows="restart",
        advice="Look at the folder that is named with `ls -ld`, `lsattr -d` and `findmnt -T`, make it writable, then "
        "`hpcaccel resume`.",
        errors=(
            r"(?:checkpoints?|step_\d+)\b.*(?:Operation not permitted|Permission denied|Read-only file system)",
            r"(?:Operation not permitted|Permission denied|Read-only file system).*/checkpoints/",
        ),
        in_run=True,
    ),
    Cause(
        name="run_directory_gone",
        meaning="a rank did not find the run directory any more; where the batch step does not either, the job ends",
        follows="restart",
        advice="Move it back to where it was, then `hpcaccel resume`: nothing is made anew at the old place.",
        errors=(r"the run directory is not there any more",),
    ),
    Cause(
        name="io_error",
        meaning="a file system failed",
        follows="restart",
        advice="If it comes again, tell the cluster's staff which path and which node.",
        errors=(
            r"\[Errno (?:5|30|107|116|121)\]",
            r"Input/output error|Read-only file system|Stale file handle|Transport endpoint is not connected",
        ),
    ),
    # -- the program -----------------------------------------------------------------------------------------------
    Cause(
        name="user_mistake",
        meaning="the program ended with code 2: a wrong argument, or something to mend in the spec",
        follows="end",
        advice="Mend what the rank's log names, and submit again.",
        ends=(r"Exited with exit code 2$",),
    ),
    Cause(
        name="import_error",
        meaning="the program needs a module that its environment does not have",
        follows="end",
        last_only=True,
        advice="Install it in the environment that `environment` names, or add its folder to the copied code.",
        errors=(r"^(?:ModuleNotFoundError|ImportError)\b",),
    ),
    Cause(
        name="not_finite",
        meaning="the loss or a gradient was not a finite number any more",
        follows="restart",
        advice="Lower the learning rate, clip gradients, or look at the data of the step that the log names.",
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
        advice="Mostly an index out of range: run once with CUDA_LAUNCH_BLOCKING=1, which names the right line.",
        errors=(r"CUDA error:", r"CU(?:BLAS|DNN|SPARSE)_STATUS_", r"^cuda\w*Error\b"),
    ),
    Cause(
        name="left",
        meaning="a rank came to the end of the program while others were in their loop",
        follows="restart",
        advice="All ranks must do equally many steps: look at the line that the log names.",
        lines=(r"^hpcaccel: rank \d+ has reached the end of the program.*, and this rank waited for it",),
        elsewhere=True,
    ),
    Cause(
        name="exception",
        meaning="the program raised an exception",
        follows="restart",
        advice="The rank's log holds the traceback.",
    ),
    Cause(
        name="crashed",
        meaning="the program ended by a fault of its own: SIGSEGV, SIGBUS, SIGABRT, SIGILL or SIGFPE",
        follows="restart",
        advice="The rank's log holds the stack; native code is at fault, so compare the versions of its libraries.",
        lines=(r"^Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction|Floating-point)",),
        ends=(r"Segmentation fault", r"Bus error", r"Aborted", r"Illegal instruction", r"Floating point exception"),
    ),
    Cause(
        name="killed",
        meaning="a rank was killed from outside, and nobody says by whom",
        follows="restart",
        advice="Often the node ran out of memory: raise slurm.mem if it comes again.",
        ends=(r"Killed", r"Terminated", r"Hangup", r"Interrupt", r"User defined signal", r"Signal \d+"),
    ),
    Cause(
        name="exit",
        meaning="the program ended with a code that says nothing more",
        follows="restart",
        advice="The rank's log holds its last words.",
        ends=(r"Exited with exit code",),
    ),
    # -- echoes of another rank's end; the cause only where no rank says more --------------------------------------
    Cause(
        name="rendezvous",
        meaning="the ranks did not find each other: a port in use, a name without address, a rank that never came",
        follows="restart",
        advice="Each start takes a new port. If it comes again, GLOO_SOCKET_IFNAME names the network to use.",
        errors=(
            r"EADDRINUSE|[Aa]ddress already in use",
            r"DistNetworkError|DistStoreError|RendezvousConnectionError|RendezvousTimeoutError",
            r"waiting for clients",
            r"client socket has (?:failed to connect|timed out)",
            r"could not form the \w+ group|no answer from rank 0|has not come",
        ),
        echo=True,
    ),
    Cause(
        name="nccl_timeout",
        meaning="a collective between GPUs did not end in time, or NCCL lost a peer",
        follows="restart",
        advice="If no rank was slow or gone, run with resilience.preflight: full, which tries the network first.",
        errors=(r"DistBackendError", r"(?i)\bnccl"),
        lines=(r"Watchdog caught collective operation timeout", r"NCCL watchdog thread terminated with exception"),
        echo=True,
    ),
    Cause(
        name="gloo_timeout",
        meaning="a collective between processes did not end in time, or a peer's connection was lost",
        follows="restart",
        advice="The rank that is missing says why in its own log; runtime.timeout_seconds is how long the others wait.",
        errors=(
            r"\bRankFailed\b",
            r"gloo|ProcessGroup",
            r"Connection (?:closed|reset|refused)|Broken pipe|by peer",
            r"Timed out waiting \d+ms",
        ),
        echo=True,
    ),
)

_BY_NAME = {row.name: row for row in CAUSES}


def cause(name: str) -> Cause:
    """The row of this name; of one that only another version knows, the row that says nothing."""
    return _BY_NAME.get(name, _BY_NAME["exit"])
