"""Questions about the cluster: its partitions, nodes, settings, accounts. Nothing here changes anything."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcaccel.slurm import parsing, site_parsing
from hpcaccel.slurm.programs import Programs
from hpcaccel.slurm.states import Association, PartitionInfo

__all__ = ["SiteQuestions"]

_ASSOCIATION_COLUMNS = (
    "DefaultAccount,Cluster,Account,Partition,DefaultQOS,QOS,MaxJobs,MaxSubmit,MaxWall,MaxTRES,GrpTRES"
)
_QOS_COLUMNS = (
    "Name,Priority,GraceTime,Preempt,PreemptMode,PreemptExemptTime,Flags,MaxWall,MaxTRES,MaxTRESPerNode,MaxTRESPerUser,"
    "MaxJobsPerUser,MaxSubmitJobsPerUser,MinTRES"
)


class SiteQuestions(Programs):
    """What Slurm tells of itself."""

    def version(self) -> str:
        """E.g. ``22.05.8``."""
        words = self._output(["sinfo", "--version"]).split()
        return words[-1] if words else ""

    def config(self) -> dict[str, str]:
        """Slurm's configuration, e.g. ``config()["KillWait"] == "30 sec"``."""
        return parsing.config_values(self._output(["scontrol", "show", "config"]))

    def partitions(self) -> list[PartitionInfo]:
        """All partitions that this user may see."""
        return parsing.partitions(
            self._output(["sinfo", "--exact", "--noheader", f"--format={parsing.PARTITION_FORMAT}"])
        )

    def failed_nodes(self, nodes: Sequence[str]) -> list[str]:
        """Those of ``nodes`` that are down or do not answer."""
        command = ["sinfo", "--exact", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T"]
        return parsing.failed_nodes(self._output(command))

    def partition_records(self) -> list[dict[str, str]]:
        """``scontrol show partition``: every partition that this user may see, with Slurm's own keys."""
        return site_parsing.records(self._output(["scontrol", "--oneliner", "show", "partition"]), "PartitionName")

    def node_records(self) -> list[dict[str, str]]:
        """``scontrol show node``: every node that this user may see, with Slurm's own keys."""
        return site_parsing.records(self._output(["scontrol", "--oneliner", "show", "node"]), "NodeName")

    def associations(self, user: str) -> list[Association]:
        """The accounts that a user may charge; [] where there is no accounting."""
        what = [*_of_user(user), f"format={parsing.ASSOCIATION_FORMAT}"]
        said = None if self._lacks("sacctmgr") else self._sacctmgr(*what, options=["--noheader"])
        return [] if said is None else parsing.associations(said)

    def association_table(self, user: str) -> list[dict[str, str]] | None:
        """The user's associations with their limits, by sacctmgr's column names; None where there is no accounting."""
        return self._table(*_of_user(user), f"format={_ASSOCIATION_COLUMNS}")

    def qos_table(self) -> list[dict[str, str]] | None:
        """All QOS with their limits, by sacctmgr's column names; None where there is no accounting."""
        return self._table("qos", f"format={_QOS_COLUMNS}")

    def has_pyxis(self) -> bool:
        """Whether srun here starts containers by itself."""
        return site_parsing.knows_containers(self._output(["srun", "--help"]))

    def _table(self, *what: str) -> list[dict[str, str]] | None:
        said = self._sacctmgr(*what)
        return None if said is None else site_parsing.table(said)

    def _sacctmgr(self, *what: str, options: Sequence[str] = ()) -> str | None:
        return self._recorded(["sacctmgr", "--parsable2", *options, "--readonly", "show", *what])


def _of_user(user: str) -> list[str]:
    if not re.fullmatch(r"[\w.@+-]+", user):
        raise ValueError(f"user {user!r} is no user name")
    return ["user", "where", f"name={user}", "withassoc"]
