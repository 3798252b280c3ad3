"""What can be said of checkpoints without opening their tensors, and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import manifest as sealed
from hpcaccel.checkpoint_files.contents import Contents, StoredTensor
from hpcaccel.checkpoint_files.pins import is_pinned
from hpcaccel.errors import CheckpointError
from hpcaccel.view.formatting import clean, clock_time, size
from hpcaccel.view.text_tables import Cell, Column, Styled, console_for, print_facts, print_table

__all__ = ["Listed", "list_checkpoints", "parts", "print_checkpoint", "print_checkpoints", "print_tensors", "put_aside"]


@dataclass(frozen=True)
class Listed:
    """A checkpoint in a list. ``problem`` says why it is not good; ``manifest`` is then what could be read, if any."""

    path: Path
    step: int
    manifest: dict[str, Any]
    pinned: bool
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        said = {key: value for key, value in self.manifest.items() if key not in ("files", "crc32", "step")}
        good = {"good": self.problem is None, "problem": self.problem, "pinned": self.pinned}
        return {"path": str(self.path), "step": self.step, **said, **good}


def list_checkpoints(place: Path) -> list[Listed]:
    """Those in a directory, oldest first, their manifests and sizes checked; or the one that ``place`` is."""
    if (place / checkpoint_files.MANIFEST).exists():
        return [_listed(place, None)]
    return [_listed(path, step) for step, path in reversed(checkpoint_files.step_directories(place))]


def put_aside(place: Path) -> list[str]:
    """Names of damaged checkpoints, and of those of a course of training that was given up."""
    names = [entry.name for entry in place.iterdir()] if place.is_dir() else []
    return sorted(
        name for name in names if name.startswith(tuple(f"{word}_step_" for word in checkpoint_files.PUT_ASIDE))
    )


def _listed(path: Path, step: int | None) -> Listed:
    problem = None
    try:
        manifest = sealed.read(path)
    except CheckpointError as error:
        manifest, problem = checkpoint_files.read_manifest(path) or {}, str(error)
    return Listed(path, step if step is not None else int(manifest.get("step", 0)), manifest, is_pinned(path), problem)


def print_checkpoints(found: Sequence[Listed], *, stream: TextIO | None = None) -> None:
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


def _row(one: Listed) -> list[Cell | tuple[Cell, Cell]]:
    said = one.manifest
    saved = clock_time(said["time"]) if "time" in said else "-"
    return [
        clean(one.path.name),
        str(one.step),
        str(said.get("epoch", "-")),
        (saved, saved.partition("-")[2] or saved),
        clean(str(said.get("reason") or "-")),
        str(said.get("world_size", "-")),
        size(said["bytes"]) if "bytes" in said else "-",
        clean(str(said.get("guarantee", "-"))),
        _state(one),
    ]


def _state(one: Listed) -> Styled:
    if one.problem is not None:
        return Styled("damaged", "bold red")
    return Styled("good, pinned" if one.pinned else "good", "green")


@dataclass(frozen=True)
class Part:
    """Tensors that belong together, such as ``models.0`` or ``optimizers.0``."""

    name: str
    tensors: int
    bytes: int


def parts(contents: Contents) -> list[Part]:
    """What the bytes of a checkpoint are spent on, in the order of the names."""
    found: dict[str, list[StoredTensor]] = {}
    for tensor in contents.tensors.values():
        found.setdefault(_part_of(tensor.key), []).append(tensor)
    return [Part(name, len(items), sum(item.bytes for item in items)) for name, items in sorted(found.items())]


def _part_of(key: str) -> str:
    words = key.split("[")[0].split(".")
    if words[0] in ("models", "optimizers", "schedulers", "objects"):
        return ".".join(words[:2])
    return "each rank's own" if words[0] == "rank" else "structure" if words[0] == "tree" else words[0]


def print_checkpoint(one: Listed, contents: Contents, *, stream: TextIO | None = None) -> None:
    facts = [(label, clean(value)) for label, value in _facts(one)]
    facts += [(clean(part.name), f"{size(part.bytes)} in {part.tensors} tensors") for part in parts(contents)]
    print_facts(facts, console=console_for(stream))


def _guarantee(said: dict[str, Any]) -> str:
    reasons = "; ".join(map(str, said.get("guarantee_reasons", ())))
    return f"{said.get('guarantee', '-')}{f': {reasons}' if reasons else ''}"


def _facts(one: Listed) -> list[tuple[str, str]]:
    said = one.manifest
    rows = [
        ("checkpoint", str(one.path)),
        ("step", f"{one.step} (epoch {said.get('epoch', '-')})"),
        ("saved", f"{clock_time(said['time'])}, {said.get('reason') or 'no reason given'}"),
        ("guarantee", _guarantee(said)),
        ("ranks", str(said.get("world_size", "-"))),
        ("written by", ", ".join(f"{name} {said[name]}" for name in ("hpcaccel", "torch", "python") if name in said)),
        ("processor", str(said.get("processor", "-"))),
        ("size", f"{size(said.get('bytes', 0))} in {len(said.get('files', ()))} files"),
    ]
    if one.pinned:
        rows.append(("pinned", "it is never deleted"))
    if "imported_from" in said:
        rows.append(("imported", f"from {said['imported_from']}: {', '.join(said.get('holds', ()))} only"))
    if said.get("missing_rng"):
        rows.append(("without", f"the random state of rank {', '.join(map(str, said['missing_rng']))}"))
    return rows


def print_tensors(contents: Contents, *, stream: TextIO | None = None) -> None:
    columns = (
        Column(title="TENSOR"),
        Column(title="DTYPE"),
        Column(title="SHAPE"),
        Column(title="SIZE", right=True),
        Column(title="CHUNKS IN", wraps=16, leaves=0),
    )
    rows = []
    for tensor in contents.tensors.values():
        shape = "x".join(map(str, tensor.shape)) or "()"
        files = ", ".join(dict.fromkeys(chunk.file for chunk in tensor.chunks))
        rows.append((clean(tensor.key), tensor.dtype, shape, size(tensor.bytes), files))
    print_table(columns, rows, console=console_for(stream))
