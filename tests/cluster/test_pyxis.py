"""Runs in containers of the real pyxis and enroot, on a cluster of this file's own.

HPCACCEL_TEST_PYXIS names the prefix that `docker/cluster build-pyxis` has created; without it, only the stand-in of
test_containers.py is tested.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .dev_cluster import Cluster, own_cluster
from .scenario import Scenario

PREFIX = os.environ.get("HPCACCEL_TEST_PYXIS", "")
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(not PREFIX, reason="HPCACCEL_TEST_PYXIS names no prefix of pyxis and enroot"),
]

PROGRAM = """
import os, signal, sys, time
where = open("/etc/image-name").read().strip()
print("rank", os.environ["RANK"], where, os.environ["SETTING"], len(os.environ["TOKEN"]), flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if int(os.environ["HPCACCEL_ATTEMPT"]) < 3:
    time.sleep(300)
print("done", flush=True)
"""
SERVE = """
import time
print("serving", open("/etc/image-name").read().strip(), flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("the ranks have ended", flush=True)
"""
LOOK = """
import os
print(open("/in put/file").read().strip(), open("/data/file").read().strip(), os.environ["SETTING"])
for folder in ("/data", "/rw", os.environ["HPCACCEL_RUN_DIR"]):
    try:
        open(f"{folder}/new", "w").close()
        print("written")
    except OSError as error:
        print(error.strerror)
"""


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    with own_cluster("--nodes", "2", "--pyxis", PREFIX) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image with this machine's Python, its libraries, and the minimum that enroot needs."""
    folder = tmp_path_factory.mktemp("image")
    root = folder / "root"
    for name in (
        "etc",
        "tmp",
        "root",
        "proc",
        "sys",
        "dev",
        "run",
        "var",
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
    ):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for tool in ("/usr/bin/python3", "/bin/bash", "/bin/sh", "/usr/bin/env", "/bin/cat", "/bin/mkdir", "/bin/mount"):
        shutil.copy(tool, root / "usr/bin")
        listed = subprocess.run(["ldd", tool], capture_output=True, text=True, check=True).stdout
        for library in map(Path, re.findall(r"/\S+", listed)):
            target = root / library.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    left_out = shutil.ignore_patterns("test", "idlelib", "tkinter", "__pycache__")
    shutil.copytree(version, root / Path(version).relative_to("/"), ignore=left_out, symlinks=False)
    for library in Path("/usr/lib", sysconfig.get_config_var("MULTIARCH") or "").glob("libffi.so*"):
        shutil.copy(library, root / library.relative_to("/"))
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/image-name").write_text("inside\n")
    (root / "etc/environment").write_text("PATH=/usr/bin:/bin\nSETTING=the image's\n")
    packed = folder / "image.sqsh"
    quick = ["-noD", "-noI", "-noF", "-no-progress", "-quiet"]
    subprocess.run(["mksquashfs", str(root), str(packed), *quick], check=True, stdout=subprocess.DEVNULL)
    return packed


@pytest.fixture
def run(own: Cluster, tmp_path: Path) -> Scenario:
    scenario = Scenario(own, tmp_path)
    scenario.env["TOKEN"] = "planted-secret"
    return scenario


def submit(run: Scenario, text: str, image: Path, *, nodes: int, **sections: Any) -> None:
    (run.folder / "program.py").write_text(text)
    container = {"image": str(image), **sections.pop("container", {})}
    environment = {"python": None, "secrets": ["TOKEN"], "env": {"SETTING": "the spec's"}}
    slurm = {"nodes": nodes, "ntasks_per_node": 2, "gpus_per_node": None, "mem": "1G"}
    entrypoint = {"command": ["python3", str(run.folder / "program.py")]}
    mounts = [str(run.folder), *container.pop("mounts", [])]
    run.submit(
        {
            "entrypoint": entrypoint,
            "runtime": {"stop": "signals"},
            "environment": environment,
            "slurm": slurm,
            "container": {**container, "mounts": mounts},
            **sections,
        }
    )


def test_container_run_with_a_component_is_preempted_stopped_and_resumed(run: Scenario, image: Path) -> None:
    (run.folder / "serve.py").write_text(SERVE)
    serve = {"command": ["python3", str(run.folder / "serve.py")]}
    beside = {"data": {"entrypoint": serve, "slurm": {"nodes": 1, "mem": "300M", "cpus_per_task": 1}}}
    submit(run, PROGRAM, image, nodes=1, components=beside)
    run.wait_for_word("rank 1 inside the spec's 14", rank=1)
    nodes = run.lines("start")[0]["nodes"]
    run.preempt(nodes)
    run.wait_for_word("rank 0 inside", attempt=2)
    run.cli("stop", run.dir.run_id)
    assert run.wait_until_over() == 85, run.story
    run.cli("resume", run.dir.run_id)
    assert run.wait_until_over() == 0, run.story
    assert run.ends == [("preempted", "requeue"), ("stop", "pause"), ("completed", "end")], run.story
    for attempt in (1, 2, 3):
        component = (run.dir.attempt(attempt) / "data-0.log").read_text()
        assert component.splitlines() == ["serving inside", "the ranks have ended"], run.story
    assert "planted-secret" not in run.story


@pytest.mark.parametrize("runtime", ["pyxis", "enroot"])
def test_mounts_with_blanks_and_flags_work(run: Scenario, image: Path, runtime: str) -> None:
    if runtime == "enroot" and not (shutil.which("squashfuse") and shutil.which("fuse-overlayfs")):
        pytest.skip("enroot starts an image file with squashfuse and fuse-overlayfs, which are not here")
    source, writable = run.folder / "a b\tc", run.folder / "rw"
    source.mkdir()
    (source / "file").write_text("found")
    writable.mkdir()
    mounts = [f"{source}:/in put", f"{source}:/data:ro", f"{writable}:/rw"]
    submit(run, LOOK, image, nodes=2, container={"runtime": runtime, "mounts": mounts})
    assert run.wait_until_over() == 0, run.story
    for rank in range(4):
        said = run.dir.rank_log(1, rank).read_text().splitlines()
        assert said == ["found found the spec's", "Read-only file system", "written", "written"], run.story


def test_invalid_image_fails_the_run_and_is_named(run: Scenario, tmp_path: Path) -> None:
    broken = tmp_path / "broken.sqsh"
    broken.write_text("no squashfs")
    submit(run, LOOK, broken, nodes=1, resilience={"restart_in_place": 0, "max_failures": 1})
    assert run.wait_until_over() == 1, run.story
    (end,) = run.lines("end")
    assert end["error_class"] == "container", run.story
    assert str(broken) in end["detail"], run.story
