"""Stand-in for open_clip_train.main (open_clip 3.3.0): its arguments, its checkpoints, `--resume latest`.

It does nothing on SIGTERM, so the signal ends it. At the end of an epoch rank 0 writes epoch_N.pt and, with
--save-most-recent, epoch_latest.pt by a rename. If LOGS/NAME/out.log exists and --resume is not `latest`, it prints an
error and exits with code 0, as the real program does.
"""

import sys
import zipfile
from pathlib import Path

from standin import RANK, Ranks, options, pause, say  # type: ignore[import-not-found]

NUMBERS = ("--train-num-samples", "--batch-size", "--epochs", "--save-frequency")
SWITCHES = ("--dataset-resampled", "--save-most-recent", "--delete-previous-checkpoint")
args = options("--train-data", "--model", "--logs", "--name", "--resume", numbers=NUMBERS, switches=SWITCHES)
ranks = Ranks()
folder = Path(args.logs, args.name, "checkpoints")
log = folder.parent / "out.log"
if any(ranks.gather(log.exists() and args.resume != "latest")):
    say("Error. Experiment already exists. Use --name {} to specify a new experiment.")
    sys.exit(0)
if RANK == 0:
    folder.mkdir(parents=True, exist_ok=True)
    log.touch()


def chosen() -> Path | None:
    """The checkpoint to resume from, as rank 0 sees it."""
    if args.resume != "latest":
        return None if args.resume is None else Path(args.resume)
    if args.save_most_recent:
        latest = folder / "epoch_latest.pt"
        return latest if latest.exists() else None
    return max(folder.glob("*.pt"), default=None)


def write(path: Path, epoch: int) -> None:
    with zipfile.ZipFile(path, "w") as archive:  # the format of torch.save
        archive.writestr("epoch", str(epoch))


epoch = 0
found = next(filter(None, ranks.gather(chosen() if RANK == 0 else None)), None)
if found is not None:
    with zipfile.ZipFile(found) as archive:
        epoch = int(archive.read("epoch"))
ranks.gather()  # all ranks have loaded
say("began at", epoch)
while epoch < args.epochs:
    pause()
    epoch += 1
    if RANK == 0:
        write(folder / f"epoch_{epoch}.pt", epoch)
        if args.save_most_recent:
            write(folder / "tmp.pt", epoch)
            (folder / "tmp.pt").replace(folder / "epoch_latest.pt")
    ranks.gather()
    say("step", epoch)
say("finished at", epoch)
