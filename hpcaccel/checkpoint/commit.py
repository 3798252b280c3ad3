"""The moves that make a checkpoint appear and disappear whole; rank 0 makes them.

A checkpoint is written to a temporary directory and renamed when it is complete. One that is removed is renamed to a
temporary name first. So whatever is killed when, a directory with a final name is complete.

Nothing here needs torch, because the process that writes in the background commits, too.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import manifest
from hpcaccel.checkpoint_files.pins import is_pinned
from hpcaccel.core.run_dir import DIRECTORY_MODE, fsync_directory, make_folder
from hpcaccel.errors import CheckpointError, Damaged

__all__ = [
    "adopt",
    "begin",
    "clean",
    "damaged",
    "delete",
    "has_adopted",
    "newest_good",
    "prune",
    "publish",
    "retire",
    "set_aside",
]

log = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"\.step_\d{8,}\..+\.tmp")


def clean(directory: Path) -> None:
    """Remove what attempts left behind that were killed while they saved. What resists is logged and stays."""
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            try:
                shutil.rmtree(path)
            except OSError as error:
                log.warning("cannot remove %s, which a former attempt left behind: %s", path, error)


def begin(temporary: Path) -> None:
    """Make the directory that a save writes to."""
    make_folder(temporary.parent)
    temporary.mkdir(mode=DIRECTORY_MODE)


def adopt(extra: Path, temporary: Path) -> None:
    """Move what lies in ``extra`` into a checkpoint that is about to be committed, and make it durable.

    Raises:
        CheckpointError: a file has a name that a checkpoint needs.
    """
    for path in sorted(extra.iterdir()):
        target = temporary / path.name
        if target.exists():
            raise CheckpointError(f"{path.name} is a checkpoint's own file: call yours something else")
        for file in [path, *path.rglob("*")]:
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        os.rename(path, target)
    extra.rmdir()


def has_adopted(path: Path) -> bool:
    """Whether a checkpoint holds files that are not its own."""
    own = {
        checkpoint_files.MANIFEST,
        checkpoint_files.PINNED,
        *(checkpoint_files.read_manifest(path) or {}).get("files", ()),
    }
    return any(entry.name not in own for entry in path.iterdir())


def publish(temporary: Path, final: Path) -> None:
    """The commit: rename, made durable before and after.

    Raises:
        CheckpointError: there is a checkpoint of that name already, or a later attempt of the run has begun.
    """
    _refuse_a_former_attempt(temporary, final)
    if final.exists():  # rename() would replace an empty directory
        raise CheckpointError(f"{final} exists already; a committed checkpoint is never overwritten")
    fsync_directory(temporary)
    os.rename(temporary, final)
    try:
        fsync_directory(final.parent)
    except OSError:
        os.rename(final, temporary)  # a power cut might take the name back as well
        raise


def _refuse_a_former_attempt(temporary: Path, final: Path) -> None:
    """A node that the scheduler believes dead may be alive: its ranks train on while others have taken their place."""
    attempt = checkpoint_files.attempt_of(temporary.name)
    attempts = final.parent.parent / "attempts"
    if attempt is None or final.parent.name != "checkpoints" or not attempts.is_dir():
        return
    # The folder is listed, for NFS answers from memory that a single name is not there.
    newest = max((int(name) for name in os.listdir(attempts) if name.isdigit()), default=0)
    if newest > attempt:
        raise CheckpointError(f"attempt {newest} of this run has begun: attempt {attempt} is over and saves no more")


def newest_good(directory: Path, *, ours: bool) -> Path | None:
    """The newest checkpoint whose manifest and file sizes are right.

    Args:
        ours: newer ones that are damaged are quarantined; else they are only passed over.
    """
    for _, path in checkpoint_files.step_directories(directory):
        try:
            manifest.read(path)
        except Damaged as error:
            if ours:
                quarantine(path, str(error))
            else:
                log.warning("checkpoint %s is damaged and passed over: %s", path, error)
        else:
            return path
    return None


def damaged(directory: Path) -> list[Path]:
    """What has been quarantined here, and what would be. Only of use where no checkpoint is good."""
    return sorted(directory.glob(f"{checkpoint_files.QUARANTINED}_*")) + [
        path for _, path in checkpoint_files.step_directories(directory)
    ]


def quarantine(path: Path, why: str) -> Path:
    """Rename a damaged checkpoint so that nobody takes it for a good one. It is kept for whoever wants to look."""
    kept = set_aside(path, checkpoint_files.QUARANTINED)
    log.warning("checkpoint %s is damaged and now called %s: %s", path.name, kept.name, why)
    return kept


def set_aside(path: Path, word: str) -> Path:
    """Rename ``step_N`` to ``<word>_step_N``, with a number behind it if that is taken."""
    target, count = path.with_name(f"{word}_{path.name}"), 1
    while target.exists():
        count += 1
        target = path.with_name(f"{word}_{path.name}.{count}")
    os.rename(path, target)
    fsync_directory(path.parent)
    return target


def prune(directory: Path, *, keep: int, newest_step: int, keep_every: int | None = None) -> None:
    """``retire`` and ``delete``."""
    delete(retire(directory, keep=keep, newest_step=newest_step, keep_every=keep_every))


def retire(directory: Path, *, keep: int, newest_step: int, keep_every: int | None = None) -> list[Path]:
    """Take their names from what is older than the newest ``keep`` good checkpoints up to ``newest_step``, the one just
    committed: the temporary directories that are to be deleted.

    A damaged one does not count as good. Later ones than the newest are of some other training and stay. So do pinned
    ones, and milestones: with ``keep_every`` the first good one in every so many steps.

    What resists is logged: the newer one is committed, and training goes on.
    """
    doomed = []
    try:
        newest_first = [
            (step, path) for step, path in checkpoint_files.step_directories(directory) if step <= newest_step
        ]
        for step, path in _too_old(newest_first, keep):
            if not is_pinned(path) and not _is_milestone(step, newest_first, keep_every):
                aside = path.with_name(checkpoint_files.temporary_name(step, "deleted"))
                os.rename(path, aside)
                doomed.append(aside)
    except OSError as error:
        log.warning("cannot delete old checkpoints in %s: %s", directory, error)
    return doomed


def delete(doomed: list[Path]) -> None:
    """Delete what ``retire`` gave. What resists is logged."""
    for path in doomed:
        try:
            shutil.rmtree(path)
        except OSError as error:
            log.warning("cannot delete %s, an old checkpoint: %s", path, error)


def _too_old(newest_first: list[tuple[int, Path]], keep: int) -> list[tuple[int, Path]]:
    """What comes after the newest ``keep`` good ones, the oldest first."""
    good = 0
    for position, (_, path) in enumerate(newest_first):
        if good >= keep:
            return newest_first[: position - 1 : -1]
        good += _is_good(path)
    return []


def _is_milestone(step: int, newest_first: list[tuple[int, Path]], keep_every: int | None) -> bool:
    """Whether this is the first good checkpoint since the last multiple of ``keep_every`` (0 excepted)."""
    if keep_every is None or step < keep_every:
        return False
    begin = step - step % keep_every
    return not any(begin <= other < step and _is_good(earlier) for other, earlier in newest_first)


def _is_good(path: Path) -> bool:
    try:
        manifest.read(path)
    except CheckpointError as error:
        log.warning("checkpoint %s does not count as good: %s", path.name, error)
        return False
    return True
