"""Stand-in for Megatron-LM's pretrain_gpt.py (Megatron core 0.18): its arguments, its stop, its checkpoints.

--exit-signal-handler: SIGTERM sets a flag. After each iteration all ranks gather their flags, save together and exit
with code 0. A checkpoint is iter_NNNNNNN; when it is complete, rank 0 writes its iteration to a file beside it. --load
without --ckpt-step takes the iteration in that file, and starts from iteration 0 if there is none.
"""

import sys
from pathlib import Path

from standin import RANK, WORLD_SIZE, Ranks, Terminated, options, pause, record, say  # type: ignore[import-not-found]

NUMBERS = (
    "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings",
    "--micro-batch-size", "--global-batch-size", "--train-iters", "--lr", "--vocab-size", "--save-interval",
    "--ckpt-step", "--exit-duration-in-mins",
)  # fmt: skip
SWITCHES = ("--bf16", "--mock-data", "--exit-signal-handler")
args = options("--tokenizer-type", "--save", "--load", numbers=NUMBERS, switches=SWITCHES)
ranks = Ranks()
terminated = Terminated() if args.exit_signal_handler else None


def save(iteration: int) -> None:
    folder = Path(args.save, f"iter_{iteration:07d}")
    if RANK == 0:
        folder.mkdir(parents=True, exist_ok=True)
    ranks.gather()
    (folder / f"__{RANK}_0.distcp").write_text(str(iteration))
    ranks.gather()
    if RANK == 0:
        record(Path(args.save, "latest_checkpointed_iteration.txt"), str(iteration))
    ranks.gather()


def load() -> int:
    tracker = Path(args.load or "", "latest_checkpointed_iteration.txt")
    if args.load is None or not tracker.exists():
        return 0
    iteration = int(args.ckpt_step or tracker.read_text())
    parts = [Path(args.load, f"iter_{iteration:07d}", f"__{rank}_0.distcp").read_text() for rank in range(WORLD_SIZE)]
    assert parts == [str(iteration)] * WORLD_SIZE
    return iteration


iteration = load()
ranks.gather()  # all ranks have loaded
say("began at", iteration)
while iteration < args.train_iters:
    pause()
    iteration += 1
    say("step", iteration)
    if terminated is not None and any(ranks.gather(terminated.received)):
        save(iteration)
        say("left at", iteration)
        sys.exit(0)
    if iteration % args.save_interval == 0:
        save(iteration)
save(iteration)
say("finished at", iteration)
