"""``sharing: group``: a new run directory that a group may read, and whose ``control/`` it may write to.

Its folders are setgid (2750, ``control/`` 2770), so all files in them belong to the group, whoever writes them. The
umask of the submission, of the batch step and of the ranks keeps them readable for the group. Other users cannot
enter the run directory. A group member can therefore read it, and write requests to stop, save and profile, but cannot
change or delete what the run has written.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunDirectoryError, SpecError
from hpcaccel.spec import JobSpec

__all__ = ["SharedGroup", "group_of", "group_umask", "let_group_read", "share"]

FOLDER_MODE = 0o2750
CONTROL_MODE = 0o2770
_MASKED = 0o027


@dataclass(frozen=True)
class SharedGroup:
    """The group that a run is shared with."""

    gid: int
    name: str


def group_of(spec: JobSpec, run: RunDir) -> SharedGroup | None:
    """The group of ``spec.sharing``, after all checks that are possible before the directory exists.

    Raises:
        SpecError: there is no such group, this user is not a member, the group is this user's own, or the group cannot
            enter a parent directory of the run.
    """
    if spec.sharing is None:
        return None
    existing = next(folder for folder in run.path.parents if folder.exists())
    group = _chosen(spec.sharing.group, existing)
    if os.geteuid() != 0 and group.gid not in {*os.getgroups(), os.getegid()}:
        raise SpecError(f"sharing: you are not a member of group {group.name!r} (yours: {', '.join(_own_groups())})")
    for folder in (existing, *existing.parents):
        if not _may_enter(folder, group):
            raise SpecError(
                f"sharing: group {group.name!r} cannot enter {folder} (mode {_mode(folder):04o}), so it "
                "could not read the run. Choose another runs directory, such as one in the project's folder, "
                f"or give the group access: chgrp {group.name} {folder} && chmod g+x {folder}"
            )
    return group


def _chosen(name: str | None, folder: Path) -> SharedGroup:
    if name is not None:
        try:
            return SharedGroup(grp.getgrnam(name).gr_gid, name)
        except KeyError:
            known = ", ".join(_own_groups())
            raise SpecError(f"sharing.group {name!r} does not exist on this machine (your groups: {known})") from None
    gid = folder.stat().st_gid
    try:
        entry = grp.getgrgid(gid)
    except KeyError:
        raise SpecError(
            f"sharing: {folder} belongs to group {gid}, which has no name: set sharing: {{group: NAME}}"
        ) from None
    if not entry.gr_mem and entry.gr_name == _user():
        raise SpecError(
            f"sharing: {folder} belongs to your own group {entry.gr_name!r}, which has no other member: set "
            f"sharing: {{group: NAME}} (your groups: {', '.join(_own_groups())})"
        )
    return SharedGroup(gid, entry.gr_name)


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


def _own_groups() -> list[str]:
    found = []
    for gid in sorted({*os.getgroups(), os.getegid()}):
        try:
            found.append(grp.getgrgid(gid).gr_name)
        except KeyError:
            found.append(str(gid))
    return found


def _mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def _may_enter(folder: Path, group: SharedGroup) -> bool:
    """Whether members of the group may enter a folder; True if another group may, to which they may belong."""
    about = folder.stat()
    if about.st_gid == group.gid:
        return bool(about.st_mode & stat.S_IXGRP)
    return bool(about.st_mode & (stat.S_IXOTH | stat.S_IXGRP))


@contextmanager
def group_umask(group: SharedGroup | None) -> Iterator[None]:
    """Context in which this process creates files that the group may read and nobody else. The umask belongs to the
    whole process: files of other threads get it, too. sbatch passes it on to the job."""
    if group is None:
        yield
        return
    before = os.umask(_MASKED)
    try:
        yield
    finally:
        os.umask(before)


def share(place: RunDir, group: SharedGroup, *, parents: Sequence[Path]) -> None:
    """Give the new, empty folders of a run to the group.

    Args:
        parents: parent folders that were created for this run.

    Raises:
        RunDirectoryError: the file system has no setgid folders, or they cannot be given to the group.
    """
    try:
        for folder in reversed(parents):
            _give(folder, group, CONTROL_MODE if _is_common(folder.parent) else FOLDER_MODE)
        _give(place.path, group, FOLDER_MODE)
        for entry in os.scandir(place.path):
            _give(Path(entry.path), group, CONTROL_MODE if entry.path == str(place.control) else FOLDER_MODE)
        probe = place.path / ".sharing"
        probe.mkdir()
        kept = probe.stat().st_gid == group.gid
        probe.rmdir()
    except OSError as error:
        raise RunDirectoryError(
            f"cannot share {place.path} with group {group.name!r}: {error.strerror}. Choose a runs directory that "
            "belongs to the group, or remove sharing"
        ) from None
    if not kept:
        raise RunDirectoryError(
            f"cannot share {place.path} with group {group.name!r}: its file system does not pass the group of a setgid "
            "folder on to new files. Choose another runs directory, or remove sharing"
        )


def _is_common(folder: Path) -> bool:
    """Whether the group may create folders in ``folder``: then each member may add runs to those that are made here."""
    return bool(folder.stat().st_mode & stat.S_IWGRP)


def let_group_read(folder: Path) -> None:
    """Let the group read all files below ``folder``, which were copied with their modes."""
    for path in [folder, *folder.rglob("*")] if folder.is_dir() else []:
        if not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            path.chmod(mode | stat.S_IRGRP | (stat.S_IXGRP if mode & stat.S_IXUSR else 0))


def _give(folder: Path, group: SharedGroup, mode: int) -> None:
    os.chown(folder, -1, group.gid)
    folder.chmod(mode)
    if stat.S_IMODE(folder.stat().st_mode) != mode:
        raise PermissionError(1, f"the file system does not keep the mode {mode:04o} of {folder}")
