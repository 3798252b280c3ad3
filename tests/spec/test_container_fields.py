"""The sections ``container`` and ``stage``: path resolution and conflicts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec import JobSpec, spec_from_values

BASE = Path("/jobs")


def spec(**sections: Any) -> JobSpec:
    return spec_from_values({"name": "a", "entrypoint": {"command": ["true"]}, **sections}, base=BASE)


def test_relative_paths_are_resolved_and_image_names_get_the_docker_scheme() -> None:
    container = spec(container={"image": "torch.sif", "mounts": ["data", "~/x:/x:ro", "/d:/e:rw"]}).container
    assert container is not None
    home = os.path.expanduser("~")
    assert container.image == "/jobs/torch.sif"
    assert container.mounts == ["/jobs/data:/jobs/data", f"{home}/x:/x:ro", "/d:/e"]
    named = spec(container={"image": "nvcr.io/nvidia/pytorch:25.09-py3"}).container
    assert named is not None
    assert named.image == "docker://nvcr.io/nvidia/pytorch:25.09-py3"
    staged = spec(stage={"sources": ["data", "/d"]}).stage
    assert staged is not None
    assert staged.sources == ["/jobs/data", "/d"]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"container": {"image": "two words"}}, "container.image 'two words' is neither a path"),
        ({"container": {"image": "a.sif", "mounts": ["/a:b"]}}, "the path in the container must be absolute"),
        ({"container": {"image": "a.sif", "mounts": ["/a,b:/c"]}}, "contains a comma"),
        ({"container": {"image": "a.sif", "workdir": "here"}}, "container.workdir 'here' must be an absolute path"),
        (
            {"container": {"image": "a.sif"}, "environment": {"venv": "/v"}},
            "environment.venv cannot be combined with container",
        ),
        (
            {"container": {"image": "a.sif"}, "srun": {"extra": ["--container-name=x"]}},
            "is not allowed: use the section container",
        ),
        ({"container": {"image": "a.sif", "runtime": "docker"}}, r"is not valid \(allowed: auto, pyxis"),
        ({"stage": {"sources": ["/a/x", "/b/x"]}}, "would both be named 'x' in the stage directory"),
        ({"stage": {"sources": ["/a"], "directory": "tmp"}}, "must be an absolute path or start with a variable"),
        (
            {"slurm": {"het": [{}]}},
            "slurm.het is not supported: to make the job heterogeneous, add the section components",
        ),
        (
            {"slurm": {"extra": {"hetjob": True}}},
            "slurm.extra.hetjob is not supported: to make the job heterogeneous, add the section components",
        ),
        ({"launcher": "mpirun"}, r"launcher 'mpirun' is not valid \(allowed: srun, torchrun\)"),
    ],
)
def test_invalid_container_stage_or_launcher_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec(**sections)
