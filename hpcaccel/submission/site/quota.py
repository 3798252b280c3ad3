"""Whether the checkpoints that a run keeps fit into the user's quota, as far as an earlier run tells their size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from hpcaccel.spec import JobSpec
from hpcaccel.spec.site import Quota, SiteFacts
from hpcaccel.submission.site.findings import Finding, error, warning
from hpcaccel.submission.site.last_run import History

__all__ = ["storage"]


def storage(spec: JobSpec, facts: SiteFacts, *, runs_dir: Path | None, history: History | None) -> Iterator[Finding]:
    """Bytes and files of ``checkpoint.keep`` checkpoints, and one that is being written, against what is left."""
    quota = None if runs_dir is None else _quota_of(runs_dir, facts)
    if quota is None or history is None:
        return
    yield from _against(
        spec, quota, history.checkpoint_bytes, quota.bytes_limit, quota.bytes_used, in_words=_size, what="checkpoints"
    )
    yield from _against(
        spec,
        quota,
        history.checkpoint_files,
        quota.inodes_limit,
        quota.inodes_used,
        in_words=lambda count: f"{count} files",
        what="files of checkpoints",
    )


def _quota_of(runs_dir: Path, facts: SiteFacts) -> Quota | None:
    """That of the nearest directory above."""
    above = [one for one in facts.quota if runs_dir.is_relative_to(one.path)]
    return max(above, key=lambda one: len(Path(one.path).parts), default=None)


def _against(
    spec: JobSpec,
    quota: Quota,
    one: int | None,
    limit: int | None,
    used: int | None,
    *,
    in_words: Callable[[int], str],
    what: str,
) -> Iterator[Finding]:
    if not one or limit is None:
        return
    keep = spec.checkpoint.keep
    left = max(0, limit - (used or 0))
    fit = left // one - 1  # one more is being written while the kept ones are there
    allowed = f"{in_words(left)} of {in_words(limit)} were left below {quota.path}"
    each = f"the last run's newest one has {in_words(one)}"
    if keep is None:
        if fit < 20:
            yield warning(
                "checkpoint.keep", f"null keeps all {what}, and {each}: {allowed}, enough for {max(0, fit + 1)} of them"
            )
        return
    needed = one * (keep + 1)
    if needed <= left:
        return
    mend = f"set checkpoint.keep to {fit}" if fit >= 1 else "make room (hpcaccel clean), or write them elsewhere"
    words = f"{keep} and one that is being written are {in_words(needed)} ({each}), and {allowed}: {mend}"
    # what is used changes from day to day; more than the whole of the quota never fits
    yield error("checkpoint.keep", words) if needed > limit else warning("checkpoint.keep", words)


def _size(count: int) -> str:
    """Bytes in powers of 1,000."""
    for divisor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= divisor:
            return f"{count / divisor:.1f} {unit}"
    return f"{count} B"
