"""Tables of checkpoints and of their contents, from manifests and indices; tensors are not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import is_pinned
from hpcaccel.checkpoint_files import manifest as sealed
from hpcaccel.checkpoint_files.contents import Contents, StoredTensor
from hpcaccel.checkpoint_files.watched import watched
from hpcaccel.core.formatting import clean, clock_time, size
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import CheckpointError
from hpcaccel.slurm.hostlist import ranks_text
from hpcaccel.view.text_tables import Cell, Column, Styled, console_for, print_facts, print_table

__all__ = [
    "CheckpointRow",
    "list_checkpoints",
    "list_watched",
    "parts",
    "print_checkpoint",
    "print_checkpoints",
    "print_tensors",
    "put_aside",
]


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint in a list. If it is damaged, ``problem`` is the reason, and ``manifest`` is the readable part.

    A checkpoint that the program has written itself (``own``) has no manifest: only its time is known.
    """

    path: Path
    step: int | None
    manifest: dict[str, Any]
    pinned: bool
    problem: str | None
    own: bool = False

    def to_json(self) -> dict[str, Any]:
        left_out = ("files", "blocks", "block_ranks", "crc32", "step")
        fields = {key: value for key, value in self.manifest.items() if key not in left_out}
        good = {"good": self.problem is None, "problem": self.problem, "pinned": self.pinned}
        return {"path": str(self.path), "step": self.step, **fields, **good}


def list_checkpoints(place: Path) -> list[CheckpointRow]:
    """The checkpoints in ``place``, oldest first, or ``place`` itself if it is a checkpoint. Manifests and
    sizes are checked."""
    if (place / checkpoint_files.MANIFEST).exists():
        return [_listed(place, None)]
    return [_listed(path, step) for step, path in reversed(checkpoint_files.step_directories(place))]


def list_watched(run: RunDir) -> list[CheckpointRow]:
    """The checkpoints that match the run's ``checkpoint.watch``: the incomplete ones, then the others, oldest first."""
    return [
        CheckpointRow(
            one.path,
            one.step,
            {"time": one.time},
            pinned=False,
            problem=None if one.complete else f"{one.path} is not complete",
            own=True,
        )
        for one in watched(run)
    ]


def put_aside(place: Path) -> list[str]:
    """Names of checkpoints that were renamed because they are damaged or from an abandoned branch of the training."""
    names = [entry.name for entry in place.iterdir()] if place.is_dir() else []
    return sorted(
        name for name in names if name.startswith(tuple(f"{word}_step_" for word in checkpoint_files.PUT_ASIDE))
    )


def _listed(path: Path, step: int | None) -> CheckpointRow:
    problem = None
    try:
        manifest = sealed.read(path)
    except CheckpointError as error:
        manifest, problem = checkpoint_files.read_manifest(path) or {}, str(error)
    return CheckpointRow(
        path, step if step is not None else int(manifest.get("step", 0)), manifest, is_pinned(path), problem
    )


def print_checkpoints(found: Sequence[CheckpointRow], *, stream: TextIO | None = None) -> None:
    columns = (
        Column(title="CHECKPOINT"),
        Column(title="STEP", right=True),
        Column(title="EPOCH", right=True, leaves=1),
        Column(title="SAVED", shortens=0, leaves=3),
        Column(title="BECAUSE", leaves=2),
        Column(title="RANKS", right=True, leaves=4),
        Column(title="SIZE", right=True, leaves=5),
        Column(title="GUARANTEE"),
        Column(title="STATE"),
    )
    print_table(columns, map(_row, found), console=console_for(stream))


def _row(one: CheckpointRow) -> list[Cell | tuple[Cell, Cell]]:
    manifest = one.manifest
    saved = clock_time(manifest["time"]) if "time" in manifest else "-"
    return [
        clean(one.path.name),
        "-" if one.step is None else str(one.step),
        str(manifest.get("epoch", "-")),
        (saved, saved.partition("-")[2] or saved),
        clean(str(manifest.get("reason") or "-")),
        str(manifest.get("world_size", "-")),
        size(manifest["bytes"]) if "bytes" in manifest else "-",
        clean(str(manifest.get("guarantee", "-"))),
        _state(one),
    ]


def _state(one: CheckpointRow) -> Styled:
    if one.own:
        return Styled("complete", "green") if one.problem is None else Styled("incomplete", "yellow")
    if one.problem is not None:
        return Styled("damaged", "bold red")
    return Styled("good, pinned" if one.pinned else "good", "green")


@dataclass(frozen=True)
class CheckpointPart:
    """Number and total size of the tensors of one object, such as ``models.0`` or ``optimizers.0``."""

    name: str
    tensors: int
    bytes: int


def parts(contents: Contents) -> list[CheckpointPart]:
    """Number and total size of the tensors of each object in a checkpoint, sorted by name."""
    found: dict[str, list[StoredTensor]] = {}
    for tensor in contents.tensors.values():
        found.setdefault(_part_of(tensor.key), []).append(tensor)
    return [
        CheckpointPart(name, len(items), sum(item.bytes for item in items)) for name, items in sorted(found.items())
    ]


def _part_of(key: str) -> str:
    words = key.split("[")[0].split(".")
    if words[0] in ("models", "optimizers", "schedulers", "objects"):
        return ".".join(words[:2])
    return "each rank's own" if words[0] == "rank" else "structure" if words[0] == "tree" else words[0]


def print_checkpoint(one: CheckpointRow, contents: Contents, *, stream: TextIO | None = None) -> None:
    facts = [(label, clean(value)) for label, value in _facts(one)]
    facts += [(clean(part.name), _size_in(part.bytes, part.tensors, "tensor")) for part in parts(contents)]
    print_facts(facts, console=console_for(stream))


def _size_in(count: int, number: int, noun: str) -> str:
    return f"{size(count)} in {number} {noun}{'' if number == 1 else 's'}"


def _guarantee(manifest: dict[str, Any]) -> str:
    reasons = "; ".join(map(str, manifest.get("guarantee_reasons", ())))
    return f"{manifest.get('guarantee', '-')}{f': {reasons}' if reasons else ''}"


def _facts(one: CheckpointRow) -> list[tuple[str, str]]:
    found = one.manifest
    versions = [f"{name} {found[name]}" for name in ("hpcaccel", "torch", "python") if name in found]
    rows = [
        ("checkpoint", str(one.path)),
        ("step", f"{one.step} (epoch {found.get('epoch', '-')})"),
        ("saved", f"{clock_time(found['time'])}, {found.get('reason') or 'no reason given'}"),
        ("guarantee", _guarantee(found)),
        ("ranks", str(found.get("world_size", "-"))),
        ("written by", ", ".join(versions)),
        ("processor", str(found.get("processor", "-"))),
        ("size", _size_in(found.get("bytes", 0), len(found.get("files", ())), "file")),
    ]
    if one.pinned:
        rows.append(("pinned", "yes, never deleted"))
    if "imported_from" in found:
        rows.append(("imported", f"from {found['imported_from']}: {', '.join(found.get('holds', ()))} only"))
    if found.get("missing_rng"):
        rows.append(("missing", f"random state of {ranks_text(found['missing_rng'])}"))
    return rows


def print_tensors(contents: Contents, *, stream: TextIO | None = None) -> None:
    columns = (
        Column(title="TENSOR"),
        Column(title="DTYPE"),
        Column(title="SHAPE"),
        Column(title="SIZE", right=True),
        Column(title="FILES", wraps=16, leaves=0),
    )
    rows = []
    for tensor in contents.tensors.values():
        shape = "x".join(map(str, tensor.shape)) or "()"
        files = ", ".join(dict.fromkeys(chunk.file for chunk in tensor.chunks))
        rows.append((clean(tensor.key), tensor.dtype, shape, size(tensor.bytes), files))
    print_table(columns, rows, console=console_for(stream))
