"""Checkpoints and profiler traces of a run, its stored files, and its origin, as sections of its report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcaccel.core.formatting import clock_time, size
from hpcaccel.core.records import RunRecord
from hpcaccel.core.run_dir import RunDir
from hpcaccel.view.checkpoint_tables import list_checkpoints, list_watched
from hpcaccel.view.html_report.page_parts import PageSection, Table
from hpcaccel.view.profile_traces import profiles

__all__ = [
    "LONGEST_TEXT",
    "checkpoint_section",
    "profile_section",
    "provenance_sections",
    "text_section",
]

LONGEST_TEXT = 200_000
"""Longest text of a file in the report, in characters."""


def checkpoint_section(run: RunDir) -> PageSection | None:
    """The checkpoints that exist; None if there are none."""
    rows = []
    for row in [*list_watched(run), *(list_checkpoints(run.checkpoints) if run.checkpoints.is_dir() else [])]:
        made, held = row.manifest.get("time"), row.manifest.get("bytes")
        rows.append(
            [
                row.path.name,
                "" if row.step is None else str(row.step),
                clock_time(made) if isinstance(made, int | float) else "",
                size(held) if isinstance(held, int | float) else "",
                str(row.manifest.get("guarantee", "")),
                row.problem or ("pinned" if row.pinned else "good"),
            ]
        )
    columns = ["checkpoint", ">step", "saved", ">size", "resumes", "condition"]
    kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    table = Table(columns=[columns[place] for place in kept], rows=[[row[place] for place in kept] for row in rows])
    return PageSection(title="Checkpoints", table=table) if rows else None


def profile_section(run: RunDir) -> PageSection | None:
    """The profiler traces of the run; None if there are none."""
    rows = [
        [
            str(one.attempt),
            str(one.rank),
            f"{one.first_step} to {one.last_step}",
            one.state,
            "" if one.path is None else size(one.bytes),
            one.path or one.detail,
        ]
        for one in profiles(run)
    ]
    columns = [">attempt", ">rank", ">steps", "state", ">size", "trace"]
    note = "ui.perfetto.dev opens these files."
    return PageSection(title="Profiler traces", note=note, table=Table(columns=columns, rows=rows)) if rows else None


def text_section(title: str, path: Path, *, folded: bool) -> PageSection | None:
    """The text of a file; None if there is no such file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    return PageSection(title=title, text=text[:LONGEST_TEXT].rstrip(), folded=folded)


def provenance_sections(run: RunDir, record: RunRecord) -> Iterator[PageSection]:
    """Facts needed to repeat the run: commit, versions, packages, jobs."""
    dirty = {True: " with uncommitted changes", False: "", None: ""}[record.git_dirty]
    branched = record.branched_from or {}
    facts = [
        ("git commit", f"{record.git_commit}{dirty}" if record.git_commit else ""),
        ("hpcaccel", record.hpcaccel_version),
        ("Python", record.python),
        ("torch", record.packages.get("torch", "")),
        ("submitted from", record.submitted_from),
        ("jobs", ", ".join(record.job_ids)),
        ("spec hash", record.spec_hash),
        ("started from", f"{branched.get('checkpoint')} of {branched.get('run_id')}" if branched else ""),
        ("run directory", str(run.path)),
    ]
    rows = [[label, value] for label, value in facts if value]
    yield PageSection(title="Environment", table=Table(columns=["", ""], rows=rows))
    if record.packages:
        listed = "\n".join(
            f"{name}=={version}" for name, version in sorted(record.packages.items(), key=lambda pair: pair[0].lower())
        )
        yield PageSection(title=f"{len(record.packages)} Python packages", text=listed, folded=True)
