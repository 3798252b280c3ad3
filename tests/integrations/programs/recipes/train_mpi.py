"""Stand-in for an MPI program that saves on SIGTERM: its ranks meet through hpcaccel's variables, not through MPI.

After each step they combine their flags (MPI_Allreduce in a real program), write one file together and exit.
"""

import sys
from pathlib import Path

from standin import RANK, Ranks, Terminated, options, pause, say  # type: ignore[import-not-found]

args = options("--output", "--restart", numbers=("--steps", "--save-every"))
output, ranks, terminated = Path(args.output), Ranks(), Terminated()


def save(step: int) -> None:
    if RANK == 0:
        output.mkdir(parents=True, exist_ok=True)
        fresh = output / "writing"
        fresh.write_text(str(step))
        fresh.replace(output / f"restart-{step}.dat")
    ranks.gather()


step = int(Path(args.restart).read_text()) if args.restart else 0
ranks.gather()  # all ranks have loaded
say("began at", step)
while step < args.steps:
    pause()
    step += 1
    say("step", step)
    stopping = any(ranks.gather(terminated.received))
    if stopping or step % args.save_every == 0:
        save(step)
    if stopping:
        say("left at", step)
        sys.exit(0)
say("finished at", step)
