"""Several trials side by side in one allocation: the share of each.

On Slurm each trial is a step that holds its part of CPUs, memory and GPUs (``--exact``), so that Slurm itself keeps
them apart. Where there are fewer GPUs than trials, or their number cannot be divided, the steps overlap and each trial
sees its own part, or one GPU that it shares. Locally each trial sees its part of ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SLOT", "Slot", "gpus_of"]

SLOT = "HPCACCEL_SLOT"
"""Variable: which part of the GPUs that its step sees is a rank's to use, where steps overlap."""
_GPUS_HERE = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one trial in an allocation of ``of`` places."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Slot:
        """From ``number/of``."""
        number, of = text.split("/")
        return cls(number=int(number), of=int(of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def _overlaps(self, env: Mapping[str, str]) -> bool:
        return bool(int(env.get("SLURM_GPUS_ON_NODE") or 0) % self.of)

    def visible(self, gpus: list[str]) -> list[str]:
        """The part of the GPUs that is this place's: its own ones, or one of which it is not the only user."""
        if not gpus:
            return []
        share = len(gpus) // self.of
        if share:
            return gpus[self.number * share : (self.number + 1) * share]
        return [gpus[self.number % len(gpus)]]

    def environment(self, env: Mapping[str, str], *, local: bool) -> dict[str, str]:
        """What the variables of the allocation are for this place, where they differ."""
        if self.of == 1:
            return {}
        changes: dict[str, str] = {}
        if local and (count := gpus_of(env, ["localhost"], local=True)):
            listed = env.get("CUDA_VISIBLE_DEVICES")
            gpus = [one for one in listed.split(",") if one] if listed else [str(one) for one in range(count)]
            changes["CUDA_VISIBLE_DEVICES"] = ",".join(self.visible(gpus))
        if not local and self._overlaps(env):
            changes[SLOT] = str(self)
        threads = env.get("OMP_NUM_THREADS", "")
        if threads.isdecimal() and threads == (env.get("SRUN_CPUS_PER_TASK") or env.get("SLURM_CPUS_PER_TASK")):
            changes["OMP_NUM_THREADS"] = str(max(1, int(threads) // self.of))
        return changes

    def srun_options(self, env: Mapping[str, str], *, ranks_per_node: int) -> list[str]:
        """Options that make a step of this place's share, beside the steps of the others."""
        if self.of == 1:
            return []
        cpus = int(env.get("SLURM_CPUS_ON_NODE") or self.of) // self.of // ranks_per_node
        options = [f"--cpus-per-task={max(1, cpus)}"]
        if (memory := env.get("SLURM_MEM_PER_NODE", "")).isdecimal() and int(memory):
            options.append(f"--mem={max(1, int(memory) // self.of)}M")
        if self._overlaps(env):
            return ["--overlap", *options]
        gpus = int(env.get("SLURM_GPUS_ON_NODE") or 0)
        if gpus and "SLURM_GPUS_PER_TASK" in env:
            options.append(f"--gpus-per-task={max(1, gpus // self.of // ranks_per_node)}")
        elif gpus:
            options.append(f"--gpus-per-node={gpus // self.of}")
        return ["--exact", *options]


def gpus_of(env: Mapping[str, str], nodes: Sequence[str], *, local: bool) -> int:
    """How many GPUs an allocation holds, all nodes together."""
    if local:
        visible = env.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return len([one for one in visible.split(",") if one.strip() and one.strip() != "-1"])
        return len(list(_GPUS_HERE.iterdir())) if _GPUS_HERE.is_dir() else 0
    if env.get("SLURM_GPUS", "").isdecimal():
        return int(env["SLURM_GPUS"])
    return int(env.get("SLURM_GPUS_ON_NODE") or 0) * len(nodes)
