"""``checkpoint.watch`` and ``entrypoint.resume_args``: presets, directories, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec import JobSpec, load_spec


def load(folder: Path, text: str) -> JobSpec:
    path = folder / "job.yaml"
    path.write_text(f"name: x\n{text}")
    return load_spec(path)


def watched_glob(folder: Path, text: str) -> str:
    watch = load(folder, text).launch_watch("/work")
    assert watch is not None
    return watch.glob


@pytest.mark.parametrize(
    ("entrypoint", "watch", "expected"),
    [
        ("{script: a.py, args: {output_dir: out}}", "transformers", "/work/out/checkpoint-*"),
        ("{script: a.py, args: {output-dir: /out}}", "transformers", "/out/checkpoint-*"),
        ("{script: a.py, args: [--output_dir, out]}", "transformers", "/work/out/checkpoint-*"),
        ("{script: a.py, args: ['--output_dir=out']}", "transformers", "/work/out/checkpoint-*"),
        ("{script: a.py, args: {output_dir: '{run_dir}/out'}}", "transformers", "{run_dir}/out/checkpoint-*"),
        (
            "{script: a.py, args: {job: {dump_folder: d}}, args_style: equals}",
            "torchtitan",
            "/work/d/checkpoint/step-*",
        ),
        ("{script: a.py, args: {save: ckpt}}", "megatron", "/work/ckpt/iter_*"),
        ("{script: a.py}", "{preset: dcp, directory: ckpt}", "/work/ckpt/*"),
        ("{script: a.py}", "{glob: 'out/*.pt'}", "/work/out/*.pt"),
        ("{script: a.py}", "{glob: '*.pt', directory: out}", "/work/out/*.pt"),
    ],
)
def test_place_of_watched_checkpoints(tmp_path: Path, entrypoint: str, watch: str, expected: str) -> None:
    (tmp_path / "a.py").touch()
    assert watched_glob(tmp_path, f"entrypoint: {entrypoint}\ncheckpoint: {{watch: {watch}}}\n") == expected


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            "checkpoint: {watch: transformers}",
            ["checkpoint.watch", "needs the directory", "no output_dir", "directory:"],
        ),
        ("checkpoint: {watch: dcp}", ["checkpoint.watch", "needs the directory"]),
        ("checkpoint: {watch: keras}", ["keras", "transformers"]),
        ("checkpoint: {watch: {}}", ["checkpoint.watch.glob", "preset"]),
        ("checkpoint: {watch: {preset: dcp, glob: x}}", ["checkpoint.watch.glob", "conflicts with preset"]),
        ("checkpoint: {watch: {glob: x, step: 'a(b'}}", ["checkpoint.watch.step", "not a regular expression"]),
        ("checkpoint: {watch: {glob: x, step: 'ab'}}", ["checkpoint.watch.step", "exactly one group"]),
        ("checkpoint: {watch: {glob: x, complete: /x}}", ["checkpoint.watch.complete", "must be relative"]),
        ("checkpoint: {resume: /x}\nruntime: {bridge: transformers}", ["checkpoint.resume", "auto or never"]),
        ("checkpoint: {watch: {glob: x}}\ncontainer: {image: /x.sif}", ["checkpoint.watch", "{run_dir}", "container"]),
    ],
)
def test_watch_that_is_refused(tmp_path: Path, sections: str, words: list[str]) -> None:
    (tmp_path / "a.py").touch()
    with pytest.raises(SpecError) as raised:
        load(tmp_path, f"entrypoint: {{script: a.py}}\n{sections}\n")
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    ("entrypoint", "expected"),
    [
        ({"resume_args": {"resume_from_checkpoint": "{newest}"}}, ["--resume_from_checkpoint", "{newest}"]),
        ({"resume_args": {"ckpt_path": "{newest}"}, "args_style": "equals"}, ["--ckpt_path={newest}"]),
        ({"resume_args": {"load": "{newest}"}, "args_style": "key=value"}, ["load={newest}"]),
        ({"resume_args": {"step": "{step}"}}, ["--step", "{step}"]),
        ({"resume_args": ["--load", "{newest}", "--finetune"]}, ["--load", "{newest}", "--finetune"]),
    ],
)
def test_resume_args_are_written_like_args(entrypoint: dict[str, Any], expected: list[str]) -> None:
    spec = JobSpec.model_validate({"name": "x", "entrypoint": {"script": "a.py", **entrypoint}})
    assert spec.entrypoint.resume_arguments() == expected


def test_resume_args_without_a_placeholder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    with pytest.raises(SpecError, match=r"must contain \{newest\} or \{step\}"):
        load(tmp_path, "entrypoint: {script: a.py, resume_args: {resume: true}}\n")
