"""Batch inference without a model: the answer to a text is its length and the number of its batch."""

import argparse
import os
import random
import resource
import signal
import time
from datetime import timedelta

import hpcaccel

parser = argparse.ArgumentParser()
parser.add_argument("file")
parser.add_argument("--items", type=int, default=50)
parser.add_argument("--batch-size", type=int, default=3)
parser.add_argument("--pause", type=float, default=0.0, help="longest time of a batch")
parser.add_argument("--slow-rank", type=int, default=-1, help="only this rank pauses, at each batch")
parser.add_argument("--signal", help="RANK:COUNT:NAME: the rank sends itself this signal in its COUNTth batch")
parser.add_argument("--raise-at", type=int, default=-1, help="the item whose answer is an error")
parser.add_argument("--model", default="small")
parser.add_argument("--forget", type=int, default=-1, help="the batch whose results are not written")
parser.add_argument("--fill-disk", action="store_true")
parser.add_argument("--timeout", type=float, default=60, help="seconds, of collectives")
parser.add_argument("--one-rank-differs", choices=("items", "batch_size", "settings"), help="in this argument")


def main() -> None:
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", 0))
    if args.fill_disk and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))  # as on a full disk, the last line is torn
    state = hpcaccel.PartialState(cpu=True, timeout=timedelta(seconds=args.timeout))
    items = [f"text {number} " + "é" * (number % 5) for number in range(args.items)]
    if rank == 1 and args.one_rank_differs == "items":
        items[3] = "other"
    elif rank == 1 and args.one_rank_differs == "batch_size":
        args.batch_size *= 2
    elif rank == 1 and args.one_rank_differs == "settings":
        args.model = "large"
    results = hpcaccel.ResultsFile(args.file, items, batch_size=args.batch_size, settings={"model": args.model})
    print("missing", len(results.missing), flush=True)
    done = 0
    with state.split_between_processes(results.missing) as mine:
        for batch in results.until_stopped(mine):
            done += 1
            slow = args.pause if rank == args.slow_rank else 0.0
            time.sleep(random.uniform(0, args.pause) if args.slow_rank < 0 else slow)
            if args.signal and args.signal.split(":")[:2] == [str(rank), str(done)]:
                os.kill(os.getpid(), signal.Signals[args.signal.split(":")[2]])
            if args.raise_at in range(batch.first, batch.first + len(batch)):
                raise ValueError(f"item {args.raise_at} is poison")
            if batch.number != args.forget:
                results.write(batch, [{"length": len(item), "batch": batch.number} for item in batch.items])
    print("done", done, flush=True)
    print("merged", results.merge(), flush=True)


if __name__ == "__main__":
    main()
