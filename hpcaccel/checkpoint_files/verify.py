"""Verification of hpcaccel checkpoints, of ``torch.distributed.checkpoint`` checkpoints, and of weight files."""

from __future__ import annotations

from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files.checksums import OnProgress, VerifyReport, verify_ours
from hpcaccel.checkpoint_files.dcp_reader import is_dcp, verify_dcp
from hpcaccel.checkpoint_files.torch_archive import archive_problem, is_archive
from hpcaccel.checkpoint_files.weight_files import SAFE, TORCH, read_index, safetensors_problems
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["checkpoints_in", "is_ours", "verify", "weight_files"]

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""Usual suffixes of ``torch.save`` files."""


def is_ours(path: Path) -> bool:
    """Whether ``path`` is an hpcaccel checkpoint: it has a manifest or (if that is lost) a checkpoint's name."""
    return (path / checkpoint_files.MANIFEST).exists() or (path.is_dir() and path in _steps(path.parent))


def _steps(directory: Path) -> set[Path]:
    return {path for _, path in checkpoint_files.step_directories(directory)}


def checkpoints_in(path: Path) -> list[Path]:
    """The checkpoints at ``path``: ``path`` itself, or all checkpoints of a run or directory, sorted by step or name.

    Raises:
        CheckpointError: ``path`` does not exist or contains no checkpoint.
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
        f"{path} contains no checkpoint: no {checkpoint_files.MANIFEST}, no .metadata, no step_… directories, and no "
        f"weight file such as {SAFE.single} or {TORCH.single}"
    )


def weight_files(path: Path) -> list[Path]:
    """The weight files in the directory ``path``: those with the names of the Hugging Face libraries if there are any,
    else all files with the suffix of a weight file. If ``path`` is a file, the result is ``path`` alone."""
    if not path.is_dir():
        return [path]
    files = sorted(item for item in path.iterdir() if item.is_file())
    for form in (SAFE, TORCH):
        if found := [item for item in files if form.owns(item.name) and item.suffix != ".json"]:
            return found
    return [item for item in files if item.suffix in (".safetensors", *_TORCH_SUFFIXES)]


def verify(path: Path, on_progress: OnProgress = lambda done, total: None) -> VerifyReport:
    """Verify ``path``, one of the checkpoints that ``checkpoints_in`` returned."""
    if path.is_dir() and is_ours(path):
        return verify_ours(path, on_progress)
    if is_dcp(path):
        return verify_dcp(path, on_progress)
    files = weight_files(path)
    report = VerifyReport(path, "safetensors" if files[0].suffix == ".safetensors" else "torch")
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        _verify_file(file, report)
        done += file.stat().st_size
        on_progress(done, total)
    report.problems += _index_problems(path, {file.name for file in files})
    return report


def _verify_file(file: Path, report: VerifyReport) -> None:
    if file.suffix == ".safetensors":
        report.problems += safetensors_problems(file)
        report.notes[:] = ["safetensors files have no CRC: only headers and sizes were checked"]
    elif is_archive(file):
        if (problem := archive_problem(file)) is not None:
            report.problems.append(f"{file}: {problem}")
        report.bytes += file.stat().st_size
    else:
        report.problems.append(f"{file} is damaged, or was saved before torch 1.6 and has no CRC")


def _index_problems(path: Path, names: set[str]) -> list[str]:
    """Messages about damaged index files, and about missing files that an index refers to."""
    problems: list[str] = []
    for index in (path / SAFE.index_name, path / TORCH.index_name):
        if not path.is_dir() or not index.is_file():
            continue
        try:
            wanted = set(read_index(index).values())
        except Damaged as error:
            problems.append(str(error))
            continue
        problems += [f"{path / name} is missing, but {index.name} refers to it" for name in sorted(wanted - names)]
    return problems
