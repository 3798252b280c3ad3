"""Stand-in for timm's train.py (pytorch-image-models 1.0.28): its arguments, its checkpoints, --resume.

It does nothing on SIGTERM, so the signal ends it. At the end of epoch N (from 0) rank 0 replaces last.pth.tar and links
it to checkpoint-N.pth.tar if N is among the ten best; a run resumes at N + 1. recovery-N-B.pth.tar is written within
epoch N, yet a run that resumes from it also starts at N + 1.
"""

import os
import zipfile
from pathlib import Path

from standin import RANK, Ranks, options, pause, say  # type: ignore[import-not-found]

NUMBERS = ("--batch-size", "--epochs", "--recovery-interval", "--checkpoint-hist")
args = options("--data-dir", "--model", "--output", "--experiment", "--resume", numbers=NUMBERS)
ranks = Ranks()
folder = Path(args.output, args.experiment)
if RANK == 0:
    folder.mkdir(parents=True, exist_ok=True)


def write(name: str, epoch: int) -> Path:
    path = folder / f"{name}.pth.tar"
    with zipfile.ZipFile(path, "w") as archive:  # the format of torch.save
        archive.writestr("epoch", str(epoch))
    return path


epoch = 0
if args.resume:
    with zipfile.ZipFile(args.resume) as archive:
        epoch = int(archive.read("epoch")) + 1
ranks.gather()  # all ranks have loaded
say("began at", epoch)
while epoch < args.epochs:
    pause()
    if RANK == 0:
        write(f"recovery-{epoch}-7", epoch)
        last = folder / "last.pth.tar"
        last.unlink(missing_ok=True)
        os.replace(write("tmp", epoch), last)
        if epoch % 2 == 0:  # every other epoch is better than the ones before
            for copy in (f"checkpoint-{epoch}.pth.tar", "model_best.pth.tar"):
                (folder / copy).unlink(missing_ok=True)
                os.link(last, folder / copy)
    ranks.gather()
    epoch += 1
    say("step", epoch)
say("finished at", epoch)
