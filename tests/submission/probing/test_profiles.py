from __future__ import annotations

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec import load_profile
from hpcaccel.spec.cluster.cluster_facts import Account, SiteFacts
from hpcaccel.submission.clusters.probe import completed, new_profile, set_program, write_profile

FACTS = SiteFacts(name="alps", probed_at=1.8e9, slurm_version="24.05.6")


def new(*settings: str, host: str | None = None) -> dict[str, object]:
    return new_profile("alps", host=host, default=False, settings=settings)


def test_written_profile_is_read_back_unchanged() -> None:
    values = new(
        "slurm.account=0123", "slurm.time=1-00:00:00", "environment.modules=[gcc/12, cuda]", "env.NCCL_DEBUG=WARN",
        "environment.env.HF_HOME=~/hf", "runs_dir=/scratch/ada", "exclude=[n07, 'n[20-23]']", host="ada@alps",
    )  # fmt: skip
    path = write_profile("alps", values)
    assert path.stat().st_mode & 0o777 == 0o600
    profile = load_profile("alps")
    assert profile is not None
    assert (profile.host, profile.slurm.account, profile.runs_dir) == ("ada@alps", "0123", "/scratch/ada")
    assert (profile.environment.modules, profile.env) == (["gcc/12", "cuda"], {"NCCL_DEBUG": "WARN"})
    assert (profile.environment.env, profile.exclude) == ({"HF_HOME": "~/hf"}, ["n07", "n[20-23]"])
    assert "host" not in profile.for_login_node()
    with pytest.raises(SpecError, match="profile 'alps' already exists"):
        new()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["slurm.partitoin=gpu"], "slurm.partitoin is not a known key"),
        (["partition=gpu"], "Did you mean 'slurm.partition'"),
        (["account"], "is not of the form key=value"),
        (["slurm.nodes=many"], "slurm.nodes 'many'"),
        (["slurm=x", "slurm.nodes=1"], "slurm is already set to 'x', which has no keys: remove one of the two"),
    ],
)
def test_invalid_setting_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        new(*settings)


@pytest.mark.parametrize("name", ["local", "slurm", "../x", "a b", "", "-x"])
def test_invalid_profile_name_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="is not a valid profile name"):
        new_profile(name, host=None, default=False, settings=[])


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "ada@", "a b", "", "@alps", "ada@alps;id"])
def test_invalid_login_is_refused(host: str) -> None:
    with pytest.raises(SpecError, match="is not a valid login"):
        new(host=host)


def test_relative_runs_dir_on_a_login_node_is_refused() -> None:
    with pytest.raises(SpecError, match="is a path on the login node"):
        new("runs_dir=runs", host="alps")


def test_facts_supply_missing_runs_dir_and_account() -> None:
    facts = FACTS.model_copy(update={"scratch": ["/scratch/ada"], "accounts": [Account(account="ml")]})
    values, told = completed({}, facts)
    assert values == {"runs_dir": "/scratch/ada/hpcaccel-runs", "slurm": {"account": "ml"}}
    assert len(told) == 2
    assert completed({"host": "alps"}, FACTS)[0]["runs_dir"] == "~/hpcaccel-runs"
    given = {"runs_dir": "/x", "slurm": {"account": "bio"}}
    assert completed(given, facts) == (given, [])


def test_program_path_in_a_profile_is_not_overwritten() -> None:
    write_profile("alps", new(host="alps"))
    profile = load_profile("alps")
    assert profile is not None
    assert set_program(profile, "/soft/env/bin/hpcaccel")
    again = load_profile("alps")
    assert again is not None
    assert again.hpcaccel == "/soft/env/bin/hpcaccel"
    assert set_program(again, "/soft/env/bin/hpcaccel")
    assert not set_program(again, "/other/hpcaccel")
