"""Stand-in for verl's main_ppo (0.9.0, the trainer before V1): its arguments, the save before the end, its checkpoints.

It does nothing on SIGTERM, so the signal ends it. After each step it saves if the step is a multiple of save_freq, or
if the Unix time in MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP is near: a minute, the longest step and
esi_redundant_time away. A checkpoint is global_step_N with the parts of actor and data; then its step is written to
latest_checkpointed_iteration.txt. resume_mode is auto (the step in that file), resume_path or disable.
"""

import json
import os
import sys
import time
from pathlib import Path

import yaml
from standin import pause, record, say  # type: ignore[import-not-found]

DEFAULTS = {
    "data.train_files": None,
    "data.val_files": None,
    "actor_rollout_ref.model.path": None,
    "trainer.use_v1": True,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.default_local_dir": "checkpoints/verl_examples/gsm8k",
    "trainer.save_freq": -1,
    "trainer.total_training_steps": None,
    "trainer.esi_redundant_time": 0,
    "trainer.resume_mode": "auto",
    "trainer.resume_from_path": None,
}
SAVE_SECONDS = 60
EXPIRES = os.environ.get("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP")


def configured() -> dict[str, object]:
    found = dict(DEFAULTS)
    for word in sys.argv[1:]:
        key, equals, value = word.partition("=")
        assert equals, f"{word!r} is not key=value"
        assert key in DEFAULTS, f"Could not override {key!r}: key is not in struct"
        found[key] = yaml.safe_load(value)
    return found


config = configured()
say("argv", json.dumps(sys.argv[1:]))
say("expires", EXPIRES)
directory = Path(str(config["trainer.default_local_dir"]))
tracker = directory / "latest_checkpointed_iteration.txt"
save_freq, last = int(str(config["trainer.save_freq"])), int(str(config["trainer.total_training_steps"]))
redundant = float(str(config["trainer.esi_redundant_time"]))


def near_the_end(longest_step: float) -> bool:
    if not EXPIRES or config["trainer.use_v1"]:
        return False
    remaining = float(EXPIRES) - time.time()
    return remaining > 0 and longest_step > 0 and remaining <= SAVE_SECONDS + longest_step + redundant


def save(step: int) -> None:
    folder = directory / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True, exist_ok=True)
    (folder / "actor" / "model.pt").write_text(str(step))
    (folder / "data.pt").write_text(str(step))
    record(tracker, str(step))


def load() -> int:
    mode = config["trainer.resume_mode"]
    if mode == "disable" or (mode == "auto" and not tracker.exists()):
        return 0
    if mode == "auto":
        folder = directory / f"global_step_{tracker.read_text()}"
    else:
        assert mode == "resume_path"
        folder = Path(str(config["trainer.resume_from_path"]))
    step = int(folder.name.removeprefix("global_step_"))
    assert (folder / "actor" / "model.pt").read_text() == (folder / "data.pt").read_text() == str(step)
    return step


step, longest = load(), 0.0
say("began at", step)
while step < last:
    began = time.time()
    pause()
    step += 1
    forced = near_the_end(longest)
    if save_freq > 0 and (step == last or step % save_freq == 0 or forced):
        if forced:
            say("Force saving checkpoint: ESI instance expiration approaching.")
        save(step)
    longest = max(longest, time.time() - began)
    say("step", step)
say("finished at", step)
