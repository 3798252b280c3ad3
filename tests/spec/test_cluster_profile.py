# ruff: noqa: E501  (error messages are not wrapped)
from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec import load_profile, load_spec, profile_names


def add(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / "config/hpcaccel/clusters" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_local_profile_exists_without_a_file() -> None:
    profile = load_profile("local")
    assert profile is not None
    assert (profile.name, profile.backend, profile.source) == ("local", "local", None)
    assert profile_names() == ["local"]
    assert load_profile() is None


def test_a_profile_is_read_from_its_file(tmp_path: Path) -> None:
    path = add(
        tmp_path,
        "alps",
        "runs_dir: ~/runs\nslurm: {account: 007, partition: gpu}\nenv: {NCCL_SOCKET_IFNAME: hsn}\ntemplates: tpl\n",
    )
    profile = load_profile("alps")
    assert profile is not None
    assert (profile.name, profile.backend, profile.default, profile.source) == ("alps", "slurm", False, path)
    assert profile.runs_dir == "/home/ada/runs"
    assert profile.templates == str(path.parent / "tpl")
    assert profile.slurm.account == "007"
    assert profile.env == {"NCCL_SOCKET_IFNAME": "hsn"}
    assert profile_names() == ["alps", "local"]


def test_local_profile_may_be_defined_by_a_file(tmp_path: Path) -> None:
    add(tmp_path, "local", "backend: local\nruns_dir: /runs\n")
    profile = load_profile("local")
    assert profile is not None
    assert profile.runs_dir == "/runs"


def test_default_profile_is_loaded_and_two_defaults_are_refused(tmp_path: Path) -> None:
    add(tmp_path, "alps", "default: true\n")
    add(tmp_path, "other", "default: false\n")
    profile = load_profile()
    assert profile is not None
    assert profile.name == "alps"
    add(tmp_path, "second", "default: true\n")
    with pytest.raises(SpecError, match=r"has default: true \(alps, second\): keep it in one of them"):
        load_profile()


@pytest.mark.parametrize("name", ["alsp", "../alps", ""])
def test_unknown_profile_error_lists_the_existing_profiles(tmp_path: Path, name: str) -> None:
    add(tmp_path, "alps", "slurm: {}\n")
    with pytest.raises(SpecError) as caught:
        load_profile(name)
    (problem,) = caught.value.problems
    assert problem.startswith(
        f"no cluster profile {name!r} (available: alps, local) in {tmp_path}/config/hpcaccel/clusters"
    )
    assert name == "" or problem.endswith("Did you mean 'alps'?")


def test_all_profile_errors_are_reported_with_their_lines(tmp_path: Path) -> None:
    path = add(
        tmp_path,
        "alps",
        "name: alsp\nbackend: slrum\nslurm:\n  signal: x\n  mem: 1G\n  mem_per_cpu: 1G\nruns_dir: $HOME/x\n",
    )
    with pytest.raises(SpecError) as caught:
        load_profile("alps")
    assert caught.value.problems == [
        f"{path}:1: name 'alsp' must be equal to the file name ('alps')",
        f"{path}:2: backend 'slrum' is not valid (allowed: slurm, local). Did you mean 'slurm'?",
        f"{path}:4: slurm.signal is set by resilience.warning_seconds",
        f"{path}:6: slurm.mem_per_cpu conflicts with mem: set only one of mem, mem_per_cpu, mem_per_gpu",
        f"{path}:7: runs_dir '$HOME/x': $HOME is not expanded here. Write ${{env:HOME}}/x",
    ]


def test_spec_overrides_profile_defaults(tmp_path: Path) -> None:
    add(
        tmp_path,
        "alps",
        "slurm: {account: abc, partition: gpu, time: 30, mem: 10G, gpus_per_node: 4, extra: {switches-x: 1}}\n"
        "environment: {modules: [cuda], env: {A: site, B: site}}\n",
    )
    (tmp_path / "job.yaml").write_text(
        "name: a\nentrypoint: {module: m}\nslurm: {partition: big, mem_per_gpu: 1G}\nenvironment: {env: {B: own}}\n"
    )
    spec = load_spec("job.yaml", profile=load_profile("alps"), overrides=["time=60"])
    assert dict(spec.slurm.flags()) == {
        "account": "abc", "partition": "big", "nodes": "1", "ntasks-per-node": "4", "gpus-per-node": "4", "mem-per-gpu": "1G",
        "time": "01:00:00", "switches-x": "1",
    }  # fmt: skip
    assert spec.environment.modules == ["cuda"]
    assert spec.environment.env == {"A": "site", "B": "own"}


def test_secret_that_the_profile_sets_in_env_is_refused(tmp_path: Path) -> None:
    add(tmp_path, "alps", "environment: {env: {TOKEN: x}}\n")
    (tmp_path / "job.yaml").write_text("name: a\nentrypoint: {module: m}\nenvironment: {env: {B: own}, conda: e}\n")
    spec = load_spec("job.yaml", profile=load_profile("alps"))
    assert spec.environment.env == {"TOKEN": "x", "B": "own"}
    (tmp_path / "job.yaml").write_text("name: a\nentrypoint: {module: m}\nenvironment: {secrets: [TOKEN]}\n")
    with pytest.raises(SpecError, match=r"^job\.yaml:3: environment\.secrets\.0 'TOKEN' is also in environment\.env"):
        load_spec("job.yaml", profile=load_profile("alps"))
