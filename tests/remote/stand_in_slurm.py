"""Stand-in for Slurm's commands on the login node: a queue in a file, whose jobs never start.

``--test-only`` predicts that a job of N nodes starts at 1N o'clock. Files in the queue's folder: ``delay`` contains the
seconds that sbatch sleeps before and after it adds a job; with ``silent``, sbatch adds the job but reports a timeout;
``at-work`` is created when sbatch starts.
"""

import fcntl
import os
import re
import sys
import time
from pathlib import Path

QUEUE = Path(os.environ["STAND_IN_QUEUE"])


def jobs() -> list[list[str]]:
    return [line.split("\t") for line in (QUEUE / "jobs").read_text().splitlines()]


def sbatch(args: list[str]) -> None:
    if "--test-only" in args:
        nodes = re.findall(r"^#SBATCH --nodes=(\d+)", Path(args[-1]).read_text(), re.MULTILINE)[0]
        start = f"2026-11-21T1{nodes}:00:00"
        print(f"sbatch: Job 9 to start at {start} using 4 processors on nodes n1 in partition gpu", file=sys.stderr)
        return
    pause = float((QUEUE / "delay").read_text()) if (QUEUE / "delay").exists() else 0.0
    script = os.path.abspath(args[-1])
    (QUEUE / "at-work").touch()
    time.sleep(pause)
    with (QUEUE / "jobs").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        number = str(len(jobs()) + 1)
        file.write(f"{number}\t{script}\tPENDING\t{os.environ.get('WANDB_API_KEY', '')}\n")
    time.sleep(pause)
    if (QUEUE / "silent").exists():
        sys.exit("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    print(number)


def squeue(args: list[str]) -> None:
    wanted = next((word.partition("=")[2].split(",") for word in args if word.startswith("--jobs=")), None)
    form = next(word.partition("=")[2] for word in args if word.startswith("--format="))
    for number, script, state, _ in jobs():
        if wanted is not None and number not in wanted:
            continue
        values = {
            "%i": number, "%F": number, "%A": number, "%o": script, "%T": state, "%P": "gpu", "%u": "me", "%D": "1",
            "%r": "Priority", "%j": "job", "%V": "2026-11-21T10:00:00", "%l": "10:00", "%S": "N/A", "%e": "N/A",
        }  # fmt: skip
        print("|".join(values.get(word, "") for word in form.split("|")))


def scancel(args: list[str]) -> None:
    lines = [[*job[:2], "CANCELLED", job[3]] if job[0] in args else job for job in jobs()]
    (QUEUE / "jobs").write_text("".join("\t".join(line) + "\n" for line in lines))


if __name__ == "__main__":
    name = Path(sys.argv[0]).name
    if name in ("sbatch", "squeue", "scancel"):
        {"sbatch": sbatch, "squeue": squeue, "scancel": scancel}[name](sys.argv[1:])
    elif name == "sinfo":
        print("slurm 23.02.0" if "--version" in sys.argv else "gpu*|up|infinite|n1|1|idle")
    elif name in ("sacct", "sacctmgr"):
        sys.exit("Slurm accounting storage is disabled")
    else:
        sys.exit("slurm_load_jobs error: Invalid job id specified")
