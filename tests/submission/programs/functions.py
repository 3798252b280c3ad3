import os
import signal
import sys


def add(a, b):
    return a + b + 100 * int(os.environ["RANK"])


def fail():
    raise ValueError("unlucky")


def leave(code):
    sys.exit(code)


def lock():
    import threading

    return [threading.Lock()]


def surroundings():
    return {
        "term": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "loaded": sorted({"pydantic", "jinja2", "typer"} & set(sys.modules)),
        "file": __file__,
    }
