"""A rank with child processes: ``KIND METHOD END WHEN``. WHEN: they start before (early) or after (late) the rank
installs its handlers. Without torch: only the signals that the children get are tested.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import Any

from hpcaccel.runtime import child_signals as children

kind, method, end, early = sys.argv[1:5]
heard = []


def listen():
    for number in children.SIGNALS:
        signal.signal(number, lambda *_: heard.append(1))
        signal.siginterrupt(number, False)
    children.shield_children(signal.getsignal(signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, children.SIGNALS)


def square(number):
    return number * number


def serve(pipe):
    """Respond to requests like a simulator, until the parent stops it."""
    while True:
        pipe.send(square(pipe.recv()))


def deaf(pipe):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(pipe)


def tidy(pipe):
    def tidy_up(number, frame):
        print("tidied up", flush=True)
        sys.exit(7)

    signal.signal(signal.SIGTERM, tidy_up)
    serve(pipe)


def with_program(pipe):
    program = subprocess.Popen(["sleep", "1000"])
    pipe.recv()
    program.terminate()
    pipe.send(program.wait(timeout=60))
    serve(pipe)


def leave_at_once(context):
    """Start children, terminate them at once, and print how many have exited."""
    children = [context.Process(target=time.sleep, args=(1000,), daemon=True) for _ in range(40)]
    for child in children:
        child.start()
        child.terminate()
    for child in children:
        child.join(10)
    print(sum(not child.is_alive() for child in children), flush=True)


def main():
    context: Any = multiprocessing.get_context(method)
    if early == "late":
        listen()
    if kind == "at_once":
        leave_at_once(context)
    elif kind == "small_pools":
        for _ in range(10):
            with context.Pool(8) as pool:  # it ends while most of its workers are still starting
                print(sum(pool.map(square, range(3))), flush=True)
            pool.join()
    elif kind == "pool":
        # The script imports hpcaccel, and creates its Accelerator after the pool.
        with context.Pool(2) as pool:
            print(sum(pool.map(square, range(10))), flush=True)
            pool.map_async(time.sleep, [1000] * 10)
            time.sleep(0.2)  # until the workers sleep; idle workers exit without a signal
        pool.join()
    else:
        ours, theirs = context.Pipe()
        child = context.Process(target=globals()[kind], args=(theirs,), daemon=True)
        child.start()
        ours.send(3)
        print(ours.recv(), flush=True)
        if early == "early":
            listen()
        if end == "scheduler":
            os.killpg(0, signal.SIGTERM)
            ours.send(4)
            print(ours.recv() if ours.poll(60) else "silent", len(heard), child.is_alive(), flush=True)
        if end == "terminate":
            child.terminate()
            child.join()
            print("exit code", child.exitcode, flush=True)
    print("ready", flush=True)
    if end == "raise":
        raise ValueError("as told")
    if end == "exit":
        sys.exit(3)
    if end == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


if __name__ == "__main__":
    main()
