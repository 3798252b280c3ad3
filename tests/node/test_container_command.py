"""Tests of the command of a rank in a container, against the documented options of the runtimes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.core.launch_spec import LaunchContainer
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.node.environment.containers import (
    cached_image,
    choose_runtime,
    enroot_uri,
    import_image,
    into_container,
    plain_uri,
)

PYXIS = {"--container-image", "--container-mounts", "--container-workdir", "--container-env"}
"""The options that we use (github.com/NVIDIA/pyxis, args.c, table spank_opts). Mounts are SRC:DST[:FLAGS], joined by
commas, and flags by +. Each becomes a line of fstab: echo "…" in a bash script."""
APPTAINER = {"--nv": 0, "--bind": 1, "--pwd": 1}
"""Options of `apptainer exec` (apptainer.org/docs/user) and their number of values. A bind is src[:dest[:opts]]."""
ENROOT = {"--rw": 0, "--mount": 1, "--env": 1}
"""github.com/NVIDIA/enroot, doc/cmd/start.md: a mount has fstab's fields, joined by colons; KEY passes a variable."""
RANK = ["python3", "/runs/r/node.pyz", "rank", "/runs/r"]
SECRET = "hunter2-planted"


def container(image: str = "docker://nvcr.io/nvidia/pytorch:25.09-py3", **changes: object) -> LaunchContainer:
    values = {
        "runtime": "auto",
        "mounts": ["/runs/r:/runs/r", "/data sets:/data:ro"],
        "workdir": "/work",
        "gpus": True,
        "env": {"HF_HOME": "/hf"},
        "images": "/runs/.images",
        "key": "0123abcd",
        **changes,
    }
    return LaunchContainer(image=image, **values)  # type: ignore[arg-type]


ENV = {
    "PATH": "/host/bin",
    "PYTHONPATH": "/host/lib",
    "TOKEN": SECRET,
    "MASTER_ADDR": "n1",
    "PYXIS_CONTAINER_NAME": "x",
}


def flags(words: list[str], known: dict[str, int]) -> tuple[dict[str, list[str]], list[str]]:
    """Options with their values, and the words after them. Fails for an option that is not documented."""
    found: dict[str, list[str]] = {}
    while words[0].startswith("--") and words[0] != "--":
        name, words = words[0], words[1:]
        found.setdefault(name, []).extend(words[: known[name]])
        words = words[known[name] :]
    return found, words


@pytest.mark.parametrize(("release", "source"), [("0.23", r"/data\040sets"), ("0.24", "/data sets")])
def test_space_in_a_mount_is_escaped_for_pyxis_before_0_24(apptainer: Path, release: str, source: str) -> None:
    """From 0.24 on pyxis writes \\040 itself, and looks for the source by the given name."""
    known = "" if release == "0.23" else 'echo "  --container-unshare=net,ipc,uts  [pyxis] new namespaces"\n'
    (apptainer.parent / "srun").write_text(SRUN + known)
    (apptainer.parent / "srun").chmod(0o755)
    wrapped = into_container(container("/images/torch.sqsh"), "pyxis", RANK, ENV)
    assert f"--container-mounts=/runs/r:/runs/r,{source}:/data:ro" in wrapped.srun


def test_pyxis_options_of_a_rank() -> None:
    wrapped = into_container(container("/images/torch.sqsh"), "pyxis", RANK, ENV, also=["/tmp/stage:/tmp/stage"])
    given = dict(word.split("=", 1) for word in wrapped.srun)
    assert given.keys() <= PYXIS
    assert given["--container-image"] == "/images/torch.sqsh"
    assert given["--container-mounts"] == r"/runs/r:/runs/r,/data\040sets:/data:ro,/tmp/stage:/tmp/stage"
    assert given["--container-workdir"] == "/work"
    assert given["--container-env"] == "HF_HOME"
    assert wrapped.command == RANK
    assert "PYXIS_CONTAINER_NAME" not in wrapped.env, "it would outlive the step"


def test_apptainer_command_of_a_rank() -> None:
    wrapped = into_container(container(), "apptainer", RANK, ENV)
    program, word, *rest = wrapped.command
    given, rest = flags(rest, APPTAINER)
    assert (Path(program).name, word, wrapped.srun) == ("apptainer", "exec", [])
    assert given == {"--nv": [], "--bind": ["/runs/r:/runs/r", "/data sets:/data:ro"], "--pwd": ["/work"]}
    assert rest == ["/runs/.images/nvcr.io_nvidia_pytorch_25.09-py3-0123abcd.sif", *RANK]
    assert wrapped.env["APPTAINERENV_HF_HOME"] == "/hf", "over the image's own"
    assert "--nv" not in into_container(container(gpus=False), "apptainer", RANK, ENV).command


def test_enroot_command_of_a_rank() -> None:
    wrapped = into_container(container(), "enroot", RANK, ENV)
    given, rest = flags(wrapped.command[2:], ENROOT)
    assert wrapped.command[:2] == ["enroot", "start"]
    assert given["--mount"] == [
        "/runs/r:/runs/r:none:x-create=auto,rbind",
        r"/data\040sets:/data:none:x-create=auto,rbind,ro",
    ]
    assert not any(sign.isspace() for mount in given["--mount"] for sign in mount), "enroot refuses it"
    assert {"TOKEN", "MASTER_ADDR", "HF_HOME", "SLURM_PROCID"} <= set(given["--env"])
    assert "PATH" not in given["--env"]
    assert rest == ["--", "/runs/.images/nvcr.io_nvidia_pytorch_25.09-py3-0123abcd.sqsh", *RANK]


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer", "enroot"])
def test_values_of_variables_are_not_passed_as_arguments(runtime: str) -> None:
    wrapped = into_container(container(), runtime, RANK, ENV)
    assert SECRET not in " ".join([*wrapped.srun, *wrapped.command])
    assert wrapped.env["TOKEN"] == SECRET
    assert "PYTHONPATH" not in wrapped.env, "the host's packages are another Python's"


@pytest.mark.parametrize(
    ("image", "wanted"),
    [
        ("docker://nvcr.io/nvidia/pytorch:25.09-py3", "docker://nvcr.io#nvidia/pytorch:25.09-py3"),
        ("docker://pytorch/pytorch:2.9", "docker://pytorch/pytorch:2.9"),
        ("docker://localhost:5000/a:1", "docker://localhost:5000#a:1"),
        ("docker://ubuntu", "docker://ubuntu"),
    ],
)
def test_registry_name_is_converted_between_docker_and_enroot(image: str, wanted: str) -> None:
    assert enroot_uri(image) == wanted
    assert plain_uri(wanted) == image


PULL = """#!/bin/bash
echo "$@" >> {log}
sleep 0.3
[[ $4 != *absent* ]] || {{ echo "manifest unknown" >&2; exit 255; }}
echo image > "$3"
"""


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a fake ``apptainer`` that has every image except ``absent``."""
    log = tmp_path / "log"
    log.touch()
    (tmp_path / "apptainer").write_text(PULL.format(log=log))
    (tmp_path / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return log


def test_concurrent_imports_pull_an_image_once(apptainer: Path, tmp_path: Path) -> None:
    import threading

    one = container(images=str(tmp_path / "runs/.images"))
    threads = [threading.Thread(target=import_image, args=(one, "apptainer")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cached_image(one, "apptainer").read_text() == "image\n"
    assert len(apptainer.read_text().splitlines()) == 1
    assert not list((tmp_path / "runs/.images").glob(".*.part"))


def test_import_of_a_missing_image_fails(apptainer: Path, tmp_path: Path) -> None:
    one = container("docker://absent:1", images=str(tmp_path / "runs/.images"))
    with pytest.raises(
        RankEnvironmentError, match=r"cannot import container.image 'docker://absent:1': .*apptainer exited with"
    ):
        import_image(one, "apptainer")
    assert not list((tmp_path / "runs/.images").glob("*.sif"))


def test_runtime_is_chosen_by_image_and_installed_programs(apptainer: Path) -> None:
    assert choose_runtime(container(), local=False) == "apptainer"
    assert choose_runtime(container("/images/torch.sif"), local=True) == "apptainer"
    with pytest.raises(RankEnvironmentError, match=r"no pyxis or enroot on .*Load a module for it"):
        choose_runtime(container("/images/torch.sqsh"), local=False)
    with pytest.raises(RankEnvironmentError, match="no pyxis on"):
        choose_runtime(container(runtime="pyxis"), local=True)


SRUN = """#!/bin/sh
echo "  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH  [pyxis] the image to use"
"""


@pytest.mark.parametrize("sign", ['"', "$", "`", "\\"])
def test_pyxis_rejects_a_mount_with_shell_characters(apptainer: Path, sign: str) -> None:
    (apptainer.parent / "srun").write_text(SRUN)
    (apptainer.parent / "srun").chmod(0o755)
    assert choose_runtime(container(), local=False) == "pyxis"
    strange = container(mounts=[f"/it{sign}s:/its"])
    with pytest.raises(RankEnvironmentError, match=r"pyxis cannot mount .* the path contains "):
        choose_runtime(strange, local=False)
    assert choose_runtime(strange, local=True) == "apptainer"
