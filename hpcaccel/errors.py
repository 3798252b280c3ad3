"""Every exception that hpcaccel raises on purpose.

::

    HpcaccelError                  something hpcaccel can explain; exit code 1
    ├── UserError                  the user can mend it; exit code 2, no traceback
    │   ├── SpecError              the spec file, an override, a profile
    │   ├── RunNotFound            no run of that name, id or job id
    │   ├── RunDirectoryError      a run directory that cannot be made, read or written
    │   ├── RunBusy                another attempt is writing to this run
    │   ├── ClusterError           no Slurm here, or Slurm refused
    │   ├── RankEnvironmentError   the variables of this process describe no usable group of ranks
    │   ├── RuntimeMisuse          a call of the runtime's that cannot work
    │   │   └── DistributedOperationException
    │   │                          ranks that give a collective different shapes or types, or call different ones
    │   └── CheckpointError        a checkpoint that cannot be saved or loaded
    │       └── Damaged            a committed one that is not what was committed
    ├── RankFailed                 another rank of this training has failed or gone
    ├── RunFailed                  a run ended without the result that was waited for
    └── SlurmCommandError          a Slurm command failed in a way that nobody expected
        └── SlurmUnreachable       nothing was handed over: no controller could be reached
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "ClusterError",
    "Damaged",
    "DistributedOperationException",
    "HpcaccelError",
    "RankEnvironmentError",
    "RankFailed",
    "RunBusy",
    "RunDirectoryError",
    "RunFailed",
    "RunNotFound",
    "RuntimeMisuse",
    "SlurmCommandError",
    "SlurmUnreachable",
    "SpecError",
    "UserError",
    "presentable",
]


_LONGEST_WORD = 400
_LONGEST_QUOTE = 200
_LONGEST_LINE = 4000
_KEPT = 80
_QUOTED = (rf"(?<![\w{quote}]){quote}(?! )[^{quote}]{{{_LONGEST_QUOTE},}}{quote}(?!\w)" for quote in "'\"")
_LONG_VALUES = re.compile("|".join([*_QUOTED, rf"\S{{{_LONGEST_WORD},}}"]))


def presentable(text: str) -> str:
    """A message as it may be shown: what came from a file or a command line cannot repaint the terminal or fill it.

    Control characters, and what turns the direction of writing, are written out. A quoted value, or a word, that is too
    long for a person is cut, and says how long it was.
    """
    return "\n".join(_cut(_written_out(line)) for line in text.split("\n"))


def _written_out(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)


def _cut(line: str) -> str:
    if len(line) <= _LONGEST_QUOTE:
        return line
    line = _LONG_VALUES.sub(lambda found: _without_the_middle(found[0], _KEPT), line)
    return line if len(line) <= _LONGEST_LINE else _without_the_middle(line, _LONGEST_LINE // 2)


def _without_the_middle(text: str, kept: int) -> str:
    return f"{text[:kept]}…{text[-kept // 4 :]} ({len(text):,} characters)"


class HpcaccelError(Exception):
    """Something that hpcaccel can explain in a sentence."""

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(presentable(one) if isinstance(one, str) else one for one in args))


class UserError(HpcaccelError):
    """A mistake that the user can mend: shown as one message, without a traceback."""

    exit_code = 2


class SpecError(UserError):
    """One or more things wrong with a spec; ``problems`` holds one line for each, ``hints`` what can be done about them
    all."""

    def __init__(self, problems: str | Sequence[str], *, hints: Sequence[str] = ()) -> None:
        self.hints = list(hints)
        self.problems = [presentable(one) for one in ([problems] if isinstance(problems, str) else problems)]
        super().__init__("\n".join([*self.problems, *self.hints]))


class RunNotFound(UserError):
    """No run answers to this name, id, prefix or job id."""


class RunDirectoryError(UserError):
    """A run directory cannot be made, read or written."""


class RunBusy(UserError):
    """Another attempt holds the run's lease."""


class ClusterError(UserError):
    """There is no Slurm here, or Slurm refused what it was asked."""


class RankEnvironmentError(UserError):
    """The environment of this process describes no usable group of ranks."""


class RuntimeMisuse(UserError):
    """A call of the runtime's that cannot work as it was made."""


class DistributedOperationException(RuntimeMisuse):
    """The ranks give one collective different shapes or types, or call different ones; each rank's are named. The name
    is Accelerate's."""


class CheckpointError(UserError):
    """A checkpoint cannot be saved or loaded; the message names the path inside it."""


class Damaged(CheckpointError):
    """A committed checkpoint is not what was committed: an older one may do."""


class RankFailed(HpcaccelError):
    """Another rank of this training has failed or gone, so that this one waits in vain; the cause is in its log."""


class RunFailed(HpcaccelError):
    """A run ended without the result that was waited for; the message says how, with the function's own traceback."""


class SlurmCommandError(HpcaccelError):
    """A Slurm command failed, and not because of what the user asked for."""

    def __init__(self, command: Sequence[str], returncode: int, stderr: str) -> None:
        self.command = list(command)
        self.returncode = returncode
        self.stderr = stderr
        super().__init__(f"{command[0]} ended with code {returncode}: {stderr.strip() or 'no message'}")


class SlurmUnreachable(SlurmCommandError):
    """No controller could be reached, so that nothing of what was asked has been handed over."""
