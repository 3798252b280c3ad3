"""Stand-in for NeMo AutoModel's command `automodel` (0.5.0): its configuration, its stop, its checkpoints.

SIGTERM sets a flag. At the end of each step all ranks gather their flags, save together and leave the loop; the command
then exits with code 0. A checkpoint epoch_E_step_S is written by all ranks, with config.yaml last; then the link LATEST
is pointed at it. S is counted from 0, so a run resumes at S + 1. checkpoint.restore_from is a directory or LATEST.
"""

import json
import os
import sys
from pathlib import Path

import yaml
from standin import RANK, Ranks, Terminated, pause, say  # type: ignore[import-not-found]

KEYS = {
    "checkpoint.enabled", "checkpoint.checkpoint_dir", "checkpoint.restore_from", "step_scheduler.ckpt_every_steps",
    "step_scheduler.max_steps",
}  # fmt: skip


def configured() -> dict[str, object]:
    """The values of the configuration file, replaced by those of the command line; no other keys are allowed."""
    file, *changes = sys.argv[1:]
    assert os.environ.keys() >= {"TORCHELASTIC_RUN_ID", "LOCAL_RANK"}, "without both, it starts torchrun itself"
    sections = yaml.safe_load(Path(file).read_text())
    assert sections.pop("recipe"), "the configuration names a recipe"
    found = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    for change in changes:
        key, _, value = change.removeprefix("--").partition("=")
        found[key] = yaml.safe_load(value)
    assert found.keys() == KEYS, f"unknown or missing: {found.keys() ^ KEYS}"
    return found


config = configured()
say("argv", json.dumps(sys.argv[1:]))
directory = Path(str(config["checkpoint.checkpoint_dir"]))
every, last = int(str(config["step_scheduler.ckpt_every_steps"])), int(str(config["step_scheduler.max_steps"]))
ranks, terminated = Ranks(), Terminated()


def save(step: int) -> None:
    folder = directory / f"epoch_0_step_{step}"
    if RANK == 0:
        folder.mkdir(parents=True)  # a checkpoint that exists is an error
    ranks.gather()
    (folder / f"optim_{RANK}.distcp").write_text(str(step + 1))
    ranks.gather()
    if RANK == 0:
        (folder / "config.yaml").write_text("recipe: x\n")
        fresh = directory / ".LATEST"
        fresh.symlink_to(folder.name)
        fresh.replace(directory / "LATEST")
    ranks.gather()


def load() -> int:
    chosen = Path(directory, str(config["checkpoint.restore_from"]))
    if chosen.name == "LATEST" and not chosen.exists():
        return 0
    return int((chosen / f"optim_{RANK}.distcp").read_text())


assert config["checkpoint.enabled"] is True
step = load()
ranks.gather()  # all ranks have loaded
say("began at", step)
stopping = False
while step < last and not stopping:
    pause()
    say("step", step + 1)
    stopping = any(ranks.gather(terminated.received))
    if stopping or step % every == every - 1 or step + 1 == last:
        save(step)
    step += 1
say("left at" if stopping else "finished at", step)
