"""Tests of a warm parent: a program that it forks behaves like one in a new Python process."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.process_identity import process_start
from hpcaccel.node.warm.warm_channel import WarmConnection
from hpcaccel.node.warm.warm_parent import FIRST_LOOK_SECONDS

ROOT = Path(__file__).parents[2]
SHIM = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from hpcaccel.node.rank import become
from hpcaccel.node.warm.start_warm import continue_as_rank
address, command = sys.argv[2], json.loads(sys.argv[3])
continue_as_rank(address, command, os.environ)
become(command, os.environ)
"""
WAIT_SECONDS = 120


class Parent:
    """A warm parent with its rank, and this process in the place of the supervisor."""

    def __init__(
        self,
        folder: Path,
        words: list[str],
        *,
        modules: list[str] | None = None,
        report: dict[str, Any] | None = None,
        run_dir: bool = False,
        python_path: str | None = None,
    ) -> None:
        self.folder = folder
        self.words = words
        ours, theirs = socket.socketpair()
        address: dict[str, Any] = {"descriptor": theirs.fileno()}
        environment = {**os.environ, "RANK": "0", "HPCACCEL_ATTEMPT": "1"}
        if report is None:
            address["modules"] = modules or []
        elif report:
            (folder / "attempts/1").mkdir(parents=True)
            (folder / "attempts/1/imports.json").write_text(json.dumps(report))
        if report is not None or run_dir:
            environment["HPCACCEL_RUN_DIR"] = str(folder)
        environment.pop("PYTHONPATH", None)
        if python_path is not None:
            environment["PYTHONPATH"] = python_path
        with (folder / "1.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SHIM, str(ROOT), json.dumps(address), json.dumps([sys.executable, *words])],
                env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        theirs.close()
        self.socket = ours
        self.connection = WarmConnection(ours, rank=0, host="here")

    def wait(self, done: Callable[[WarmConnection], bool]) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not done(self.connection):
            assert time.monotonic() < end, (self.log(1), self.log(2))
            select.select([self.socket], [], [], 1.0)
            self.connection.receive()
            assert not self.connection.closed, (self.log(1), self.log(2))

    def ended(self) -> int:
        self.wait(lambda connection: connection.code is not None)
        assert self.connection.code is not None
        return self.connection.code

    def fork(self, attempt: int = 2, *, forget: bool = False, **variables: str) -> None:
        self.wait(lambda connection: connection.warm)
        environment = {"HPCACCEL_ATTEMPT": str(attempt), **variables}
        order = {"arguments": self.words, "environment": environment, "unset": [], "forget": forget}
        self.connection.start(attempt, {**order, "log": str(self.folder / f"{attempt}.log")})
        self.wait(lambda connection: connection.pid is not None)

    def log(self, attempt: int) -> str:
        path = self.folder / f"{attempt}.log"
        return path.read_text() if path.exists() else ""

    def end(self) -> int:
        self.connection.send({"do": "end"})
        return self.process.wait(WAIT_SECONDS)


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Callable[..., Parent]]:
    made: list[Parent] = []

    def make(program: str, *words: str, **options: Any) -> Parent:
        if not words:
            (tmp_path / "program.py").write_text(program)
            words = (str(tmp_path / "program.py"), "an argument", "--option")
        made.append(Parent(tmp_path, list(words), **options))
        return made[-1]

    yield make
    for one in made:
        one.connection.close()
        one.process.wait(WAIT_SECONDS)


def same_twice(one: Parent) -> tuple[int, str]:
    """The exit code and output of the program, which are the same in a new process and in a forked one."""
    first = one.ended()
    one.fork()
    assert (one.ended(), one.log(2)) == (first, one.log(1))
    return first, one.log(2)


NAMESPACE = """
from __future__ import annotations
import __main__, os, signal, sys, threading
x: int = 1
print(sorted(name for name in globals()), __spec__ and __spec__.name, __cached__)
print(__name__, __file__, __package__, __doc__)
print(type(__loader__).__name__, __loader__.path, __annotations__, __builtins__, __main__.x, sys.modules["__main__"])
print(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.warnoptions, sys.excepthook is sys.__excepthook__)
print(sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.name, sys.stdin.read(), os.getcwd())
print([signal.getsignal(number) for number in range(1, 32) if number not in (9, 19)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.sigpending(), signal.set_wakeup_fd(-1))
print(threading.current_thread() is threading.main_thread(), threading.active_count())
print(os.getpid() == os.getsid(0) == os.getpgrp(), sorted(os.listdir("/proc/self/fd")), os.umask(0o022))
print(open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)))
print(open("/proc/self/comm").read(), os.sched_getscheduler(0), os.nice(0), "hpcaccel" in sys.modules)
"""


def test_forked_program_finds_what_a_new_process_has(parent: Callable[..., Parent]) -> None:
    one = parent(NAMESPACE)
    code, output = same_twice(one)
    assert code == 0, output
    assert "HPCACCEL_WARM" not in output


ENDS = {
    "return": "print('the end', end='')",
    "sys.exit": "import sys; sys.exit(3)",
    "exit with a text": "import sys; sys.exit('why not')",
    "exit with None": "raise SystemExit",
    "exit with a large number": "import sys; sys.exit(85 + 256)",
    "exception": "def f():\n    1 / 0\nf()",
    "exception with a cause": "try:\n    1 / 0\nexcept OverflowError:\n    pass\nfinally:\n    raise ValueError('x')",
    "exception group": "raise ExceptionGroup('some', [ValueError(1), KeyError(2)])",
    "syntax error": "print('never'\n",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "import os, signal; print('before', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "os._exit": "import os; print('lost'); os._exit(7)",
    "abort": "import os; os.abort()",
    "own hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\nraise OSError(5)",
    "failing hook": "import sys\nsys.excepthook = lambda *a: 1 / 0\nraise OSError(5)",
    "atexit": "import atexit\natexit.register(print, 'a')\natexit.register(print, 'b')\nraise OSError(5)",
    "last exception": "import atexit, sys\natexit.register(lambda: print(sys.last_value))\nraise OSError(5)",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "finaliser": "class A:\n    def __del__(self): print('deleted')\na = A()",
}


@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS.keys())
def test_forked_program_ends_as_in_a_new_process(parent: Callable[..., Parent], program: str) -> None:
    same_twice(parent(program))


SPAWN = """
import dataclasses, multiprocessing, pickle, sys

@dataclasses.dataclass
class Pair:
    left: int
    right: int

def work(pair):
    return Pair(pair.right, pair.left)

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Pair(1, 2))) == Pair(1, 2)
    for method in ("spawn", "fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(work, [Pair(1, 2)]), flush=True)
"""


def test_classes_of_main_can_be_pickled_and_used_by_spawned_workers(parent: Callable[..., Parent]) -> None:
    code, output = same_twice(parent(SPAWN))
    assert (code, output.count("Pair(left=2, right=1)")) == (0, 3), output


@pytest.mark.parametrize(
    "words", [("-m", "package.program", "x"), ("-c", "import sys; print(sys.argv, sys.path); 1 / 0")]
)
def test_modules_and_texts_are_run_as_by_python(
    parent: Callable[..., Parent], tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("print('package', __name__)\n")
    (tmp_path / "package/program.py").write_text(NAMESPACE.replace(", __cached__", "") + "\nraise ValueError('x')\n")
    code, output = same_twice(parent("", *words))
    assert code == 1, output


RANDOM = """
import numpy, os, random, secrets, tempfile, uuid
print(random.random(), numpy.random.rand(), secrets.token_hex(), uuid.uuid4(), os.path.basename(tempfile.mktemp()))
"""


def test_random_numbers_of_a_forked_program_differ_from_the_attempt_before(parent: Callable[..., Parent]) -> None:
    one = parent(RANDOM, modules=["numpy", "numpy.random", "secrets", "tempfile", "uuid"])
    one.ended()
    for attempt in (2, 3):
        one.fork(attempt)
        assert one.ended() == 0
    values = [one.log(attempt).split() for attempt in (1, 2, 3)]
    assert [len(set(column)) for column in zip(*values, strict=True)] == [3] * 5


BLOCKED = """
import os, signal, subprocess, sys, time
text = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", text])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def started(one: Parent, attempt: int) -> list[int]:
    """The process IDs of the rank and of its child."""
    wait_for(lambda: len(one.log(attempt).split()) == 2)
    one.wait(lambda connection: connection.pid is not None)
    return [int(one.connection.pid or 0), *(int(word) for word in one.log(attempt).split() if word.isdigit())]


def test_signals_reach_the_rank_and_what_it_leaves_ends_before_the_next_attempt(parent: Callable[..., Parent]) -> None:
    one = parent(BLOCKED)
    _, child = started(one, 1)
    os.kill(one.process.pid, signal.SIGTERM)  # as Slurm does: to all processes of the step
    one.connection.send({"do": "signal", "number": int(signal.SIGTERM)})
    assert one.ended() == 85
    assert process_start(child) is not None
    one.fork()
    second = started(one, 2)
    assert process_start(child) is None
    one.connection.send({"do": "kill"})
    assert one.ended() == -signal.SIGKILL
    assert one.end() == -signal.SIGKILL
    wait_for(lambda: [process_start(pid) for pid in second] == [None, None])


@pytest.mark.parametrize("how", ["killed", "no supervisor"])
def test_rank_ends_with_its_parent_or_the_supervisor(parent: Callable[..., Parent], how: str) -> None:
    one = parent(BLOCKED)
    rank, _ = started(one, 1)
    if how == "killed":
        one.process.kill()
    else:
        one.connection.close()
    wait_for(lambda: process_start(rank) is None)
    assert one.process.wait(WAIT_SECONDS) == -signal.SIGKILL


def test_signal_between_two_attempts_reaches_the_next_rank(parent: Callable[..., Parent]) -> None:
    one = parent("import os, sys; sys.exit(1) if os.environ['HPCACCEL_ATTEMPT'] == '1' else None\nwhile True: pass")
    assert one.ended() == 1
    one.process.send_signal(signal.SIGTERM)
    one.fork()
    assert one.ended() == -signal.SIGTERM


def test_signal_to_another_run_does_not_reach_the_next_rank(parent: Callable[..., Parent]) -> None:
    one = parent("import os, sys, time; time.sleep(0.3); sys.exit(os.environ['HPCACCEL_ATTEMPT'] == '1')")
    assert one.ended() == 1
    one.process.send_signal(signal.SIGTERM)
    one.fork(forget=True)
    assert one.ended() == 0


LOADED = "import sys; print('known' in sys.modules)"
LOCAL = """
import _thread, os, subprocess, sys, threading, types
value = os.environ.get("LEVEL")
everything = dict(os.environ)
if "THREADS" in os.environ:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if "LOW_LEVEL_THREADS" in os.environ:
    _thread.start_new_thread(threading.Event().wait, ())
if "PROCESSES" in os.environ:
    kept = subprocess.Popen(["sleep", "600"])
if "DEVICE" in os.environ:
    kept = open("/dev/full")
if "CUDA" in os.environ:
    counted = types.SimpleNamespace(
        _is_in_bad_fork=lambda parent=os.getpid(): parent != os.getpid(),  # as after torch.cuda.device_count()
        is_initialized=lambda: os.environ["CUDA"] == "initialised",
    )
    sys.modules["torch"] = types.SimpleNamespace(cuda=counted)
if "BROKEN" in os.environ:
    raise SystemError("not here")
"""


@pytest.fixture
def known(tmp_path: Path, parent: Callable[..., Parent]) -> Callable[..., Parent]:
    """Starts ``LOADED`` below a parent whose report lists the module ``known``."""

    def start(**values: Any) -> Parent:
        (tmp_path / "known.py").write_text(LOCAL)
        origins = {"known": str(tmp_path / "known.py")}
        one = parent(LOADED, report={"modules": ["known"], "origins": origins, "changed": [], **values})
        assert one.ended() == 0
        return one

    return start


def test_modules_of_the_report_are_there_in_a_forked_rank(known: Callable[..., Parent]) -> None:
    one = known()
    one.fork(LEVEL_OF_OTHERS="3")
    assert (one.ended(), one.log(1), one.log(2), one.connection.problem) == (0, "False\n", "True\n", "")


UNSAFE = {
    "variable read by a module": ({"changed": ["LEVEL", "OTHER"]}, {}, "the program sets LEVEL"),
    "variable read by a library": ({"changed": ["OMP_NUM_THREADS"]}, {}, "the program sets OMP_NUM_THREADS"),
    "other file": ({"origins": {"known": "/elsewhere/known.py"}}, {}, "known is another one here than in the ranks"),
    "threads": ({}, {"THREADS": "1"}, "an imported module has started threads"),
    "threads that Python does not know": ({}, {"LOW_LEVEL_THREADS": "1"}, "an imported module has started threads"),
    "processes": ({}, {"PROCESSES": "1"}, "an imported module has started processes"),
    "device": ({}, {"DEVICE": "1"}, "an imported module has opened a device"),
    "CUDA": ({}, {"CUDA": "initialised"}, "CUDA has been initialised"),
    "GPUs were counted": ({}, {"CUDA": "counted"}, ""),
    "exception": ({}, {"BROKEN": "1"}, "known cannot be imported: SystemError('not here')"),
}


@pytest.mark.parametrize(("report", "variables", "problem"), UNSAFE.values(), ids=UNSAFE.keys())
def test_rank_is_a_new_process_if_an_import_would_differ(
    known: Callable[..., Parent],
    monkeypatch: pytest.MonkeyPatch,
    report: dict[str, Any],
    variables: dict[str, str],
    problem: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    one = known(**report)
    one.fork()
    assert (one.ended(), one.log(2), one.connection.problem) == (0, one.log(1), problem)


def test_rank_is_a_new_process_if_a_variable_has_changed_that_a_module_has_read(known: Callable[..., Parent]) -> None:
    one = known()
    one.fork(LEVEL="3")
    assert (one.ended(), one.log(2)) == (0, "False\n")
    assert one.connection.problem == "LEVEL, which a module has read, has another value now"


def test_rank_is_a_new_process_if_a_module_has_changed(known: Callable[..., Parent]) -> None:
    one = known()
    one.wait(lambda connection: connection.warm)
    path = one.folder / "known.py"
    path.write_text(LOCAL + "# another version\n")
    one.fork()
    assert (one.ended(), one.log(2), one.connection.problem) == (0, "False\n", f"{path} has changed")


def test_forked_program_and_its_modules_are_read_anew(parent: Callable[..., Parent], tmp_path: Path) -> None:
    folder = tmp_path / "later"
    (tmp_path / "mine.py").write_text("value = 1\n")
    one = parent("import mine; print(mine.value)", python_path=str(folder))
    assert (one.ended(), one.log(1)) == (0, "1\n")
    one.wait(lambda connection: connection.warm)
    folder.mkdir()
    (folder / "other.py").write_text("value = 3\n")
    (tmp_path / "mine.py").write_text("value = 'two'\n")
    (tmp_path / "program.py").write_text("import mine, other; print(mine.value, other.value)")
    one.fork()
    assert (one.ended(), one.log(2), one.connection.problem) == (0, "two 3\n", "")


def test_rank_is_a_new_process_before_its_modules_are_known(parent: Callable[..., Parent]) -> None:
    one = parent("import os; print(os.environ.get('HPCACCEL_RUN_DIR') is not None)", report={})
    assert one.ended() == 0
    order = {"arguments": one.words, "environment": {"HPCACCEL_ATTEMPT": "2"}, "unset": [], "forget": False}
    one.connection.start(2, {**order, "log": str(one.folder / "2.log")})
    assert (one.ended(), one.log(2)) == (0, "True\n")
    assert (one.connection.warm, one.connection.problem) == (False, "the modules have not been imported yet")


def test_forked_rank_is_no_child_of_a_rank(parent: Callable[..., Parent]) -> None:
    program = "from hpcaccel.runtime import child_signals; print(child_signals._born_with_defaults)"
    one = parent(program, modules=["hpcaccel.runtime.child_signals"], run_dir=True)
    assert same_twice(one) == (0, "0\n")


MAPS = """
import mmap, sys, time
with open(sys.argv[1] + ".so.40", "w+b") as file:
    file.truncate(1)
    kept = mmap.mmap(file.fileno(), 1)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("library", "bound"), [("libpmix", True), ("libpmi2", True), ("libmpi", True), ("libz", False)]
)
def test_rank_with_mpi_is_reported(parent: Callable[..., Parent], tmp_path: Path, library: str, bound: bool) -> None:
    (tmp_path / "maps.py").write_text(MAPS)
    one = parent("", str(tmp_path / "maps.py"), library, report={})
    wait_for(lambda: (tmp_path / f"{library}.so.40").exists())
    time.sleep(FIRST_LOOK_SECONDS * 2)
    one.connection.send({"do": "kill"})
    assert one.ended() == -signal.SIGKILL
    assert one.connection.bound == bound
