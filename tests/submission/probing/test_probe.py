"""Probing a cluster, with recorded output of Slurm."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.spec import ClusterProfile
from hpcaccel.submission.clusters.checks import check
from hpcaccel.submission.clusters.probe import probe

RECORDED = Path(__file__).parents[2] / "data" / "slurm"
PROFILE = ClusterProfile(name="alps")
ACCOUNTS = (
    "Def Acct|Cluster|Account|Partition|Def QOS|QOS|MaxJobs|MaxSubmit|MaxWall|MaxTRES|GrpTRES\nml|{}|ml|||normal|||||\n"
)


class Recorded:
    """Replaces ``subprocess.run`` with a release's recorded output; ``changes`` override it (None: no such program)."""

    def __init__(self, release: str, **changes: tuple[int, str, str] | None) -> None:
        self.folder = RECORDED / release
        cluster = {"22.05": "dev", "26.11": "new"}[release]
        self.answers: dict[str, tuple[int, str, str] | None] = {
            "version": (0, self._file("version"), ""),
            "config": (0, self._file("scontrol-show-config"), ""),
            "partition": (0, self._file("scontrol-show-partition"), ""),
            "node": (0, self._file("scontrol-show-node"), ""),
            "user": (0, ACCOUNTS.format(cluster), ""),
            "qos": (0, self._file("sacctmgr-qos"), ""),
            "srun": (0, "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n", ""),
            "sh": (
                0,
                "@@ user\nada\n@@ home\n/home/ada\n@@ scratch\n/scratch/ada\n@@ apptainer\napptainer 1.3.4\n",
                "",
            ),
            **changes,
        }

    def _file(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def __call__(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert options["stdin"] == subprocess.DEVNULL
        what = next(word for word in ("version", *self.answers) if word in command or f"--{word}" in command)
        answer = self.answers[what]
        if answer is None:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(list(command), *answer)


@pytest.mark.parametrize(("version", "release"), [("22.05", "22.05.8"), ("26.11", "26.11.0-0rc1")])
def test_probe_reads_the_facts_of_a_recorded_cluster(version: str, release: str) -> None:
    facts = probe(PROFILE, Recorded(version), now=1.8e9)
    assert (facts.slurm_version, facts.user, facts.home, facts.probed_at) == (release, "ada", "/home/ada", 1.8e9)
    assert facts.config.cluster_name in ("dev", "new")
    assert [(one.name, one.node_types) for one in facts.partitions] == [
        ("gpu", ["2xgpu-8cpu-20G"]),
        ("urgent", ["2xgpu-8cpu-20G"]),
    ]
    assert facts.default_partition is facts.partition("gpu")
    assert [(one.account, one.default) for one in facts.accounts] == [("ml", True)]
    assert [one.name for one in facts.qos] == ["normal"]
    assert (facts.containers.pyxis, facts.containers.apptainer, facts.containers.enroot) == (True, "1.3.4", None)
    assert facts.unknown == [
        "your own quota: neither `lfs quota` nor `quota` reports one; the values are for whole file systems"
    ]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        (1, "", "sacctmgr: error: Access/permission denied\n"),
        (1, "", "You are not running a supported accounting_storage plugin\n"),
    ],
)
def test_unreadable_accounts_do_not_fail_the_probe(answer: tuple[int, str, str] | None) -> None:
    facts = probe(PROFILE, Recorded("22.05", user=answer, qos=answer))
    assert (facts.accounts, facts.qos, facts.config.accounting) == ([], [], True)
    assert facts.partitions


def test_accounts_are_not_queried_without_accounting() -> None:
    text = (RECORDED / "22.05/scontrol-show-config.txt").read_text()
    text = text.replace("accounting_storage/slurmdbd", "accounting_storage/none")
    facts = probe(PROFILE, Recorded("22.05", config=(0, text, ""), user=None, qos=None))
    assert facts.config.accounting is False
    assert facts.unknown[0] == "accounts and QOS: this cluster has no accounting (AccountingStorageType is none)"


def test_denied_queries_are_listed_as_unknown() -> None:
    denied = (1, "", "slurm_load_node error: Access/permission denied\n")
    sinfo = (0, "gpu*|up|4|64|512000|1-00:00:00|1:00:00|REQUEUE|1|gpu:a100:4(S:0-1)\n", "")
    recorded = Recorded("22.05", node=denied, srun=None)
    recorded.answers["--exact"] = sinfo
    facts = probe(PROFILE, recorded)
    (kind,) = facts.node_types
    assert (kind.name, kind.gpus, kind.cpus, kind.count) == ("nodes-of-gpu", {"a100": 4}, 64, 4)
    assert facts.containers.pyxis is None
    assert [line.partition(":")[0] for line in facts.unknown[:2]] == ["scontrol show node", "srun --help"]


def test_missing_slurm_or_controller_fails_the_probe() -> None:
    with pytest.raises(ClusterError, match="sinfo was not found on this machine"):
        probe(PROFILE, Recorded("22.05", version=None))
    behind_ssh = ClusterProfile(name="alps", host="ada@alps", runs_dir="~/runs")
    with pytest.raises(ClusterError, match=r"sinfo was not found on 'ada@alps'\. The host must be a login node"):
        probe(behind_ssh, Recorded("22.05", version=None))
    down = (1, "", "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)\n")
    with pytest.raises(SlurmCommandError, match="Unable to contact slurm controller"):
        probe(PROFILE, Recorded("22.05", config=down))
    with pytest.raises(ClusterError, match="nothing to probe"):
        probe(ClusterProfile(name="local", backend="local"), Recorded("22.05"))


def test_profile_is_checked_against_the_facts() -> None:
    facts = probe(PROFILE, Recorded("22.05"))
    assert check(PROFILE, facts) == []
    wrong = ClusterProfile.model_validate(
        {"name": "alps", "host": "ada@alps", "exclude": ["n[3-5]"], "slurm": {"partition": "gpux", "gpus_per_node": 2}}
    )
    assert [(one.key, one.is_error) for one in check(wrong, facts)] == [
        ("slurm.partition", True),
        ("exclude", True),
        ("host", False),
        ("runs_dir", False),
    ]
    assert "node 'n5' is not on the cluster (has: n1, n2, n3, n4)" in str(check(wrong, facts)[1])
