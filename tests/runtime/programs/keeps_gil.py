import ctypes
import os
import sys
from pathlib import Path

from hpcaccel.runtime.health.thread_stacks import SIGNAL, StackDumper

StackDumper(Path(sys.argv[1]), 0).register()
if os.fork() == 0:
    os.kill(os.getpid(), SIGNAL)
    os._exit(0)
assert os.wait()[1] == 0


def keeps_pythons_lock():
    print("now", flush=True)
    ctypes.PyDLL(None).sleep(60)


keeps_pythons_lock()
