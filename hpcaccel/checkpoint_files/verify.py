"""Whether what lies in a place is whole: our checkpoints, DCP's, and files of weights."""

from __future__ import annotations

import json
from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files.checksums import Report, Tell, verify_ours
from hpcaccel.checkpoint_files.dcp_reader import is_dcp, verify_dcp
from hpcaccel.checkpoint_files.safetensors_reader import safetensors_problems
from hpcaccel.checkpoint_files.torch_archive import archive_problem, is_archive
from hpcaccel.checkpoint_files.weight_files import SAFE, TORCH
from hpcaccel.errors import CheckpointError

__all__ = ["checkpoints_in", "is_ours", "verify", "weight_files"]

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def is_ours(path: Path) -> bool:
    """Whether it is one of our checkpoints; by its name also one that has lost its manifest."""
    return (path / checkpoint_files.MANIFEST).exists() or (path.is_dir() and path in _steps(path.parent))


def _steps(directory: Path) -> set[Path]:
    return {path for _, path in checkpoint_files.step_directories(directory)}


def checkpoints_in(path: Path) -> list[Path]:
    """What there is to verify at ``path``: itself, or every checkpoint of a run or a directory, oldest first.

    Raises:
        CheckpointError: nothing that is known here.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_file() or is_ours(path) or is_dcp(path) or weight_files(path):
        return [path]
    for place in (path, path / "checkpoints"):
        if steps := [step for _, step in reversed(checkpoint_files.step_directories(place))]:
            return steps
    if found := sorted(
        child for child in path.iterdir() if is_dcp(child) or (child / checkpoint_files.MANIFEST).exists()
    ):
        return found
    raise CheckpointError(
        f"{path} holds no checkpoint: neither {checkpoint_files.MANIFEST} nor .metadata, no step_… directories, and no "
        f"{SAFE.single}, {TORCH.single} or another file of weights"
    )


def weight_files(path: Path) -> list[Path]:
    """The files of weights in a directory: a model's as the Hugging Face libraries call them, else all there are."""
    if not path.is_dir():
        return [path]
    files = sorted(item for item in path.iterdir() if item.is_file())
    for form in (SAFE, TORCH):
        if found := [item for item in files if form.owns(item.name) and item.suffix != ".json"]:
            return found
    return [item for item in files if item.suffix in (".safetensors", *_TORCH_SUFFIXES)]


def verify(path: Path, tell: Tell = lambda done, total: None) -> Report:
    """Check one of what :func:`checkpoints_in` found, completely."""
    if path.is_dir() and is_ours(path):
        return verify_ours(path, tell)
    if is_dcp(path):
        return verify_dcp(path, tell)
    files = weight_files(path)
    report = Report(path, "safetensors" if files[0].suffix == ".safetensors" else "torch")
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        _verify_file(file, report)
        done += file.stat().st_size
        tell(done, total)
    report.problems += _index_problems(path, {file.name for file in files})
    return report


def _verify_file(file: Path, report: Report) -> None:
    if file.suffix == ".safetensors":
        report.problems += safetensors_problems(file)
        report.notes[:] = ["safetensors files have no CRC: heads and sizes were checked"]
    elif is_archive(file):
        if (problem := archive_problem(file)) is not None:
            report.problems.append(f"{file}: {problem}")
        report.bytes += file.stat().st_size
    else:
        report.problems.append(f"{file} is no archive of torch.save (before torch 1.6 they had no CRC), or damaged")


def _index_problems(path: Path, names: set[str]) -> list[str]:
    """Files that an index names and that are not there."""
    problems: list[str] = []
    for index in (path / SAFE.index_name, path / TORCH.index_name):
        if not path.is_dir() or not index.is_file():
            continue
        try:
            wanted = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{index} is damaged: {error!r}")
            continue
        problems += [f"{path / name} is missing, and {index.name} names it" for name in sorted(wanted - names)]
    return problems
