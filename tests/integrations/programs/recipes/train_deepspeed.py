"""Stand-in for a script with DeepSpeed's engine (0.19): its checkpoints, and the variables that it starts from.

`deepspeed.init_distributed()` starts without the launcher if all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT are set. `save_checkpoint` writes global_stepN on all ranks; then rank 0 writes that name to `latest`.
`load_checkpoint` takes a tag, by default the one in `latest`. The script does nothing on SIGTERM: the signal ends it.
"""

import os
from pathlib import Path

from standin import RANK, WORLD_SIZE, Ranks, options, pause, record, say  # type: ignore[import-not-found]

args = options("--deepspeed_config", "--save_dir", "--load_tag", numbers=("--save_steps", "--max_steps"))
assert os.environ.keys() >= {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
directory, ranks = Path(args.save_dir), Ranks()


def save(step: int) -> None:
    folder = directory / f"global_step{step}"
    if RANK == 0:
        folder.mkdir(parents=True, exist_ok=True)
    ranks.gather()
    (folder / f"zero_pp_rank_{RANK}_mp_rank_00_optim_states.pt").write_text(str(step))
    ranks.gather()
    if RANK == 0:
        record(directory / "latest", folder.name)


step = 0
if args.load_tag:
    files = sorted((directory / args.load_tag).glob("zero_pp_rank_*"))
    steps = {int(file.read_text()) for file in files}
    assert len(files) == WORLD_SIZE
    assert len(steps) == 1
    step = steps.pop()
ranks.gather()  # all ranks have loaded
say("began at", step)
while step < args.max_steps:
    pause()
    step += 1
    if step % args.save_steps == 0:
        save(step)
    ranks.gather()
    say("step", step)
say("finished at", step)
