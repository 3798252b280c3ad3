"""hpcaccel's public exceptions.

::

    HpcaccelError                  base class; exit code 1
    ├── UserError                  the user can fix it; exit code 2, no traceback
    │   ├── SpecError              an invalid spec file, override or profile
    │   ├── RunNotFound            no run has this name, run ID or job ID
    │   ├── RunDirectoryError      a run directory cannot be created, read or written
    │   ├── RunBusy                the run or sweep is still in use
    │   ├── ClusterError           a cluster cannot be used, or refused the request
    │   ├── RankEnvironmentError   the environment variables do not describe a valid group of ranks
    │   ├── RuntimeMisuse          an invalid call of the runtime
    │   │   └── DistributedOperationException
    │   │                          ranks call different collectives, or the same one with different shapes or types
    │   └── CheckpointError        a checkpoint cannot be saved or loaded
    │       └── Damaged            files of a checkpoint are missing or damaged
    ├── RankFailed                 another rank of this training failed or exited
    ├── RunFailed                  a run ended without the requested result
    └── SlurmCommandError          a Slurm command failed unexpectedly
        └── SlurmUnreachable       no controller could be reached: nothing was submitted or changed
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
"""A word of at least this many characters is shortened."""
_LONGEST_QUOTE = 200
"""A quoted value of at least this many characters is shortened."""
_LONGEST_LINE = 4000
"""A line with more characters than this is shortened."""
_KEPT = 80
"""Number of characters kept at the beginning of a shortened value; a quarter as many are kept at its end."""
_QUOTED = (rf"(?<![\w{quote}]){quote}(?! )[^{quote}]{{{_LONGEST_QUOTE},}}{quote}(?!\w)" for quote in "'\"")
_LONG_VALUES = re.compile("|".join([*_QUOTED, rf"\S{{{_LONGEST_WORD},}}"]))


def presentable(text: str) -> str:
    """Make a message safe to print: values from files and command lines cannot control the terminal or flood it.

    Control characters and bidirectional marks are escaped. Long words, quoted values and lines are shortened, and their
    original length is appended in parentheses.
    """
    return "\n".join(_cut(_escaped(line)) for line in text.split("\n"))


def _escaped(line: str) -> str:
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
    """Base class of hpcaccel's public exceptions, whose messages are for the user."""

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(presentable(one) if isinstance(one, str) else one for one in args))


class UserError(HpcaccelError):
    """An error that the user can fix. The command line shows its message without a traceback."""

    exit_code = 2


class SpecError(UserError):
    """An invalid spec, override or profile. ``problems`` has one item per problem, ``hints`` has further advice."""

    def __init__(self, problems: str | Sequence[str], *, hints: Sequence[str] = ()) -> None:
        self.hints = list(hints)
        self.problems = [presentable(one) for one in ([problems] if isinstance(problems, str) else problems)]
        super().__init__("\n".join([*self.problems, *self.hints]))


class RunNotFound(UserError):
    """No run has this name, ID, ID prefix or job ID."""


class RunDirectoryError(UserError):
    """A run directory cannot be created, read or written."""


class RunBusy(UserError):
    """The run or sweep is still in use: one of its jobs is pending or running, or it is stopping."""


class ClusterError(UserError):
    """A cluster cannot be used (Slurm is missing, the login failed …), or Slurm refused a request."""


class RankEnvironmentError(UserError):
    """The environment variables of this process do not describe a valid group of ranks."""


class RuntimeMisuse(UserError):
    """An invalid call of the runtime, for example with conflicting arguments or at the wrong time."""


class DistributedOperationException(RuntimeMisuse):
    """The ranks call different collectives, or the same one with different shapes or types. The message lists the
    call of each rank. Accelerate has an exception of the same name."""


class CheckpointError(UserError):
    """A checkpoint cannot be found, saved or loaded."""


class Damaged(CheckpointError):
    """Files of a checkpoint are missing or damaged. An older checkpoint may still be intact."""


class RankFailed(HpcaccelError):
    """Another rank of this training failed, exited or lost its connection: this rank cannot continue."""


class RunFailed(HpcaccelError):
    """A run ended without the requested result. The message contains the reason and, for a function, its traceback."""


class SlurmCommandError(HpcaccelError):
    """A Slurm command failed unexpectedly, for example because the controller did not respond."""

    def __init__(self, command: Sequence[str], returncode: int, stderr: str) -> None:
        self.command = list(command)
        self.returncode = returncode
        self.stderr = stderr
        super().__init__(f"{command[0]} exited with code {returncode}: {stderr.strip() or 'no message'}")


class SlurmUnreachable(SlurmCommandError):
    """No Slurm controller could be reached: nothing was submitted or changed."""
