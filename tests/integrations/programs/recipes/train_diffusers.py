"""Stand-in for the scripts in diffusers' examples (0.39.0): their arguments, their checkpoints, how they resume.

They do nothing on SIGTERM, so the signal ends them. The main process saves checkpoint-N through accelerate, which
writes the states of the random number generators last. --resume_from_checkpoint is a path, of which only the last part
counts, or `latest`: the highest number, complete or not.

In the first attempt the save of the third checkpoint does not end, so that the test can stop the run in its middle.
"""

import shutil
import time
from pathlib import Path

from standin import FIRST, RANK, Ranks, options, pause, say  # type: ignore[import-not-found]

NUMBERS = ("--train_batch_size", "--max_train_steps", "--checkpointing_steps", "--checkpoints_total_limit")
TEXTS = ("--pretrained_model_name_or_path", "--train_data_dir", "--output_dir", "--resume_from_checkpoint")
args = options(*TEXTS, numbers=NUMBERS)
output, ranks = Path(args.output_dir), Ranks()


def number(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def save(step: int) -> None:
    old = sorted(output.glob("checkpoint-*"), key=number)
    for folder in old[: max(0, len(old) - args.checkpoints_total_limit + 1)]:
        shutil.rmtree(folder)
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pytorch_lora_weights.safetensors").write_text(str(step))
    (folder / "optimizer.bin").write_text(str(step))
    if FIRST and step == 3 * args.checkpointing_steps:
        say("saving", step)
        time.sleep(60)
    (folder / "random_states_0.pkl").write_text(str(step))


step = 0
if args.resume_from_checkpoint:
    newest = max(output.glob("checkpoint-*"), key=number, default=None)
    latest = args.resume_from_checkpoint == "latest"
    chosen = newest if latest else output / Path(args.resume_from_checkpoint).name
    assert chosen is not None
    assert (chosen / "random_states_0.pkl").exists(), f"{chosen} is incomplete"
    step = number(chosen)
ranks.gather()  # all ranks have loaded
say("began at", step)
while step < args.max_train_steps:
    pause()
    step += 1
    if RANK == 0 and step % args.checkpointing_steps == 0:
        save(step)
    ranks.gather()
    say("step", step)
say("finished at", step)
