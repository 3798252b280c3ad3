"""``spec_version``, keys that were renamed, and the policy for both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

import hpcaccel
from hpcaccel.core.progress_notes import SHOW_NOTE
from hpcaccel.errors import SpecError
from hpcaccel.spec import load_profile, load_spec, load_sweep, schema, spec_from_values, sweep_schema
from hpcaccel.spec.loading import spec_version
from hpcaccel.spec.loading.spec_version import RENAMED, SPEC_VERSION, Renamed
from hpcaccel.spec.loading.workflow import read_jobs

JOB = "name: a\nentrypoint: {command: [true]}\n"
OLD = Renamed("resilience.failures", "resilience.max_failures", since="0.2", removed="0.4")


@pytest.fixture
def notes() -> Iterator[list[str]]:
    shown: list[str] = []
    token = SHOW_NOTE.set(shown.append)
    yield shown
    SHOW_NOTE.reset(token)


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_version, "RENAMED", (OLD,))


def file(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("line", ["", "spec_version: 1\n", "spec_version: 0x1\n"])
def test_current_version_and_none_give_the_same_spec(tmp_path: Path, line: str) -> None:
    assert load_spec(file(tmp_path, line + JOB)) == spec_from_values({"name": "a", "entrypoint": {"command": ["true"]}})


def test_a_newer_file_is_one_error_that_says_to_upgrade(tmp_path: Path) -> None:
    path = file(tmp_path, "name: a\nspec_version: 7\nfuture: {x: 1}\n")
    for load in (load_spec, load_sweep, read_jobs):
        with pytest.raises(SpecError) as caught:
            load(path)
        assert caught.value.problems == [
            f"{path}:2: spec_version 7 needs a newer hpcaccel: this one ({hpcaccel.__version__}) reads versions up to "
            f"{SPEC_VERSION}. Upgrade it: pip install --upgrade hpcaccel"
        ]
    with pytest.raises(SpecError, match="Upgrade it"):
        spec_from_values({"spec_version": 7, "name": "a"})


@pytest.mark.parametrize("value", ["0", "-1", "one", "1.5", "true", "[1]"])
def test_what_is_no_version_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(SpecError, match="is not a version: write spec_version: 1, or remove it"):
        load_spec(file(tmp_path, f"spec_version: {value}\n{JOB}"))


def test_a_base_file_has_its_own_version(tmp_path: Path) -> None:
    file(tmp_path, "spec_version: 9\nslurm: {nodes: 2}\n", "base.yaml")
    with pytest.raises(
        SpecError, match=r"job.yaml:1: extends 'base.yaml': .*base.yaml:1: spec_version 9 needs a newer"
    ):
        load_spec(file(tmp_path, "extends: base.yaml\n" + JOB))


def test_version_on_the_command_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="spec_version is allowed only at the top level of a spec file"):
        load_spec(file(tmp_path, JOB), overrides=["spec_version=1"])


def test_schemas_know_the_key() -> None:
    for made in (schema(), sweep_schema()):
        assert next(iter(made["properties"])) == "spec_version"
    checker = jsonschema.Draft202012Validator(schema())
    assert checker.is_valid({"spec_version": SPEC_VERSION, "extends": "base.yaml"})
    assert not checker.is_valid({"spec_version": SPEC_VERSION + 1, "extends": "base.yaml"})


def test_an_old_key_is_read_with_a_warning_that_names_the_new_one(
    tmp_path: Path, notes: list[str], renamed: None
) -> None:
    path = file(tmp_path, JOB + "resilience:\n  failures: 7\n")
    assert load_spec(path).resilience.max_failures == 7
    assert load_spec(path).resilience.max_failures == 7
    assert notes == [
        f"{path}:4: resilience.failures is deprecated since hpcaccel 0.2, and 0.4 no longer reads it: write "
        "resilience.max_failures"
    ]


def test_an_old_key_is_warned_of_in_python_and_in_files_with_several_jobs(tmp_path: Path, renamed: None) -> None:
    values = {"name": "a", "entrypoint": {"command": ["true"]}, "resilience": {"failures": 7}}
    with pytest.warns(UserWarning, match="write resilience.max_failures"):
        assert spec_from_values(values).resilience.max_failures == 7
    assert values["resilience"] == {"failures": 7}
    text = "jobs:\n  b:\n    entrypoint: {command: [true]}\n    resilience: {failures: 7}\n"
    with pytest.warns(UserWarning, match=r"several.yaml:4: resilience.failures is deprecated"):
        (job,) = read_jobs(file(tmp_path, text, "several.yaml"))
    assert job.resilience.max_failures == 7


def test_errors_of_an_old_key_have_its_line(tmp_path: Path, notes: list[str], renamed: None) -> None:
    with pytest.raises(SpecError, match=r"wrong.yaml:4: resilience.max_failures .*'many'"):
        load_spec(file(tmp_path, JOB + "resilience:\n  failures: many\n", "wrong.yaml"))
    both = file(tmp_path, JOB + "resilience: {failures: 7, max_failures: 8}\n")
    with pytest.raises(SpecError, match=r"is the old name of resilience.max_failures, which is set too: remove"):
        load_spec(both)


def test_profiles_have_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCACCEL_PROFILES", str(tmp_path))
    file(tmp_path, "spec_version: 1\nslurm: {partition: gpu}\n", "alps.yaml")
    assert load_profile("alps").slurm.partition == "gpu"
    file(tmp_path, "spec_version: 2\n", "eiger.yaml")
    with pytest.raises(SpecError, match=r"eiger.yaml:1: spec_version 2 needs a newer hpcaccel"):
        load_profile("eiger")


def release(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


def test_no_deprecated_key_has_outlived_its_release() -> None:
    """The next but one release removes it: the row goes, and ``moved`` of its section names the new key."""
    for one in (*RENAMED, OLD):
        since, removed = release(one.since), release(one.removed)
        assert since[0] < removed[0] or removed[1] - since[1] == 2
        assert release(hpcaccel.__version__) < removed, f"remove {one.old}"
