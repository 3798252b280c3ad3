"""The journal: no acknowledged line is lost if a process dies, is suspended or runs out of disk space."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import HpcaccelError, RunDirectoryError
from hpcaccel.sweeps.journal_file import JournalFile
from hpcaccel.sweeps.journal_segments import Segments

optuna = pytest.importorskip("optuna")

from hpcaccel.sweeps.journal import Journal  # noqa: E402  (needs optuna)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(level)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def seen(path: Path) -> list[Any]:
    """The ``say`` values of the lines that count."""
    found = []
    for line, _ in JournalFile(path).lines():
        try:
            found.append(json.loads(line).get("say"))
        except ValueError:
            pass
    return [say for say in found if say is not None]


def open_study(path: Path) -> Any:
    storage = optuna.storages.JournalStorage(Journal(path))
    return optuna.create_study(
        storage=storage, study_name="s", load_if_exists=True, sampler=optuna.samplers.RandomSampler()
    )


def test_lines_of_several_writers_have_one_order(path: Path) -> None:
    one, other = JournalFile(path), JournalFile(path)
    one.append([{"say": 1}, {"say": 2}])
    other.append([{"say": 3}], sync=True)
    one.append([{"say": 4}])
    assert seen(path) == [1, 2, 3, 4]
    assert [behind for _, behind in one.lines()][-1] == path.stat().st_size


def test_closed_journal_leaves_no_other_file(path: Path) -> None:
    journal = JournalFile(path)
    journal.append([{"say": 1}])
    del journal
    assert os.listdir(path.parent) == ["journal.jsonl"]


KILLED = """\
import os, signal, sys
from hpcaccel.sweeps.journal_file import JournalFile
file = JournalFile(sys.argv[1])
file.append([{"say": 2}])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_exiting_process_removes_the_claims_of_killed_processes(path: Path) -> None:
    file = JournalFile(path)
    file.append([{"say": 1}])
    command = [sys.executable, "-c", KILLED, str(path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": os.getcwd()}, check=False)
    assert len(list(path.parent.glob(".journal-*.claim"))) == 2
    assert seen(path) == [1, 2]
    del file
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_line_torn_at_any_byte_loses_only_itself(path: Path) -> None:
    study = open_study(path)
    study.tell(study.ask(), 1.0)
    kept = path.read_bytes()
    study.tell(study.ask(), 2.0)
    torn = path.read_bytes()[len(kept) :].splitlines(keepends=True)[0]
    for cut in range(len(torn)):
        path.write_bytes(kept + torn[:cut])
        study = open_study(path)
        trial = study.ask()
        study.tell(trial, 3.0)
        assert trial.number == 1
        assert [one.value for one in open_study(path).trials] == [1.0, 3.0]


def test_line_without_a_newline_is_not_read_before_or_after_the_next_append(path: Path) -> None:
    journal = JournalFile(path)
    journal.append([{"say": 1}])
    with path.open("ab") as file:
        file.write(b'{"say":2}')  # only the newline is missing
    assert seen(path) == [1]
    journal.append([{"say": 3}])
    assert seen(path) == [1, 3]


def test_invalid_last_line_is_read_again_later(path: Path) -> None:
    """NFS may show zeros where another node's data has not arrived yet."""
    journal = Journal(path)
    journal.append_logs([{"op_code": 5, "n": 0}])
    good = b'{"op_code":5,"n":1}\n'
    with path.open("ab") as file:
        file.write(b"\0" * (len(good) - 1) + b"\n")
    assert [log["n"] for log in journal.read_logs(0)] == [0]
    data = path.read_bytes()
    path.write_bytes(data[: -len(good)] + good)
    assert [log["n"] for log in journal.read_logs(1)] == [1]


# -- lock holders that die or are suspended -----------------------------------------------------------------------


HOLDER = """
import os, signal, sys
from hpcaccel.sweeps import journal_file
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(journal_file, sys.argv[2], die)
journal_file.JournalFile(sys.argv[1]).append([{"say": "dead"}])
"""


def test_lock_of_a_killed_holder_is_bypassed_at_once(path: Path) -> None:
    journal = JournalFile(path, patience_seconds=3600)
    journal.append([{"say": 1}])
    for _ in range(2):
        subprocess.run([sys.executable, "-c", HOLDER, path, "_write_all"], check=False)
    journal.append([{"say": 2}])
    journal.append([{"say": 3}])
    assert seen(path) == [1, 2, 3]
    assert not list(path.parent.glob("*.lock"))


def test_lock_of_a_remote_holder_is_bypassed_after_a_wait(path: Path) -> None:
    journal = JournalFile(path, patience_seconds=0.1)
    journal.append([{"say": 1}])
    lock = Segments(path).lock(0)
    lock.write_text(json.dumps({"host": "elsewhere", "machine": "boot:1", "pid": 1, "start": 1, "token": "t"}))
    journal.append([{"say": 2}])
    lock.write_text("")  # the lock of a closed segment has no effect
    JournalFile(path).append([{"say": 3}])
    assert seen(path) == [1, 2, 3]
    assert "process 1 on elsewhere" in (path.parent / "journal.1.jsonl").read_text()


class Sleeper(JournalFile):
    """Pauses with the lock held until ``wake`` is set."""

    def __init__(self, path: Path, where: str) -> None:
        super().__init__(path)
        self.where = where
        self.asleep, self.wake = threading.Event(), threading.Event()

    def _sleep(self, where: str) -> None:
        if where == self.where and not self.wake.is_set():
            self.asleep.set()
            assert self.wake.wait(30)

    def _write(self, number: int, data: bytes, sync: bool) -> int | None:
        self._sleep("before it opens the file")
        end = super()._write(number, data, sync)
        self._sleep("after it wrote")
        return end


def slow_write(sleeper: Sleeper) -> Callable[[int, bytes], None]:
    def write(fd: int, data: bytes) -> None:
        size = os.fstat(fd).st_size
        sleeper._sleep("before it writes")
        sleeper._sleep("before it writes as NFS does")
        if sleeper.where.endswith("as NFS does"):
            # An NFS client reads the file's length first and writes there, even over data appended since.
            mine = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
            os.pwrite(mine, data, size)
            os.close(mine)
        else:
            os.write(fd, data)

    return write


@pytest.mark.parametrize(
    "where", ["before it opens the file", "before it writes", "before it writes as NFS does", "after it wrote"]
)
def test_line_of_a_slow_lock_holder_counts_once_and_damages_no_other(
    path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = JournalFile(path, patience_seconds=0.1)
    other.append([{"say": 1}])
    sleeper = Sleeper(path, where)
    thread = threading.Thread(target=lambda: sleeper.append([{"say": "slow"}]))
    with monkeypatch.context() as patched:
        patched.setattr("hpcaccel.sweeps.journal_file._write_all", slow_write(sleeper))
        thread.start()
        assert sleeper.asleep.wait(30)
    other.append([{"say": 2}])
    other.append([{"say": 3}])
    sleeper.wake.set()
    thread.join(30)
    other.append([{"say": 4}])
    said = seen(path)
    assert sorted(map(str, said)) == ["1", "2", "3", "4", "slow"]
    assert [say for say in said if say != "slow"] == [1, 2, 3, 4]


def test_segment_closed_repeatedly_keeps_its_first_length(path: Path) -> None:
    journal = JournalFile(path)
    journal.append([{"say": 1}])
    for _ in range(3):
        Segments(path).close(0, "a test")
        with path.open("ab") as file:  # beyond the measured length
            file.write(b'{"say":"late"}\n')
    journal.append([{"say": 2}])
    assert seen(path) == [1, 2]


def test_reader_beyond_the_end_of_a_closed_segment_gets_an_error(path: Path) -> None:
    journal = JournalFile(path)
    journal.append([{"say": 1}])
    list(journal.lines())
    closer = Segments(path)
    closer._make_next(0, 0, "a test")
    os.chmod(path, 0o440)
    with pytest.raises(HpcaccelError, match="Restart the process"):
        list(journal.lines())


def test_copied_journal_without_file_permissions_is_continued(path: Path, tmp_path: Path) -> None:
    journal = JournalFile(path)
    journal.append([{"say": 1}])
    Segments(path).close(0, "a test")
    journal.append([{"say": 2}])
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in path.parent.glob("journal*.jsonl"):
        shutil.copyfile(file, copy / file.name)
    JournalFile(copy / path.name).append([{"say": 3}])
    assert seen(copy / path.name) == [1, 2, 3]


APPENDER = """
import sys
from hpcaccel.sweeps.journal_file import JournalFile
journal, me = JournalFile(sys.argv[1]), sys.argv[2]
number = 0
while True:
    number += 1
    journal.append([{"say": f"{me}.{number}", "fill": "x" * 200}], sync=number % 8 == 0)
    print(number, flush=True)
"""


def test_random_kills_lose_no_acknowledged_line(path: Path) -> None:
    source = random.Random(5)
    outputs: list[Path] = []
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        outputs.append(path.parent / f"told-{len(outputs)}")
        with outputs[-1].open("wb") as file:
            command = [sys.executable, "-S", "-c", APPENDER, str(path), str(len(outputs) - 1)]
            processes.append(subprocess.Popen(command, stdout=file, env={**os.environ, "PYTHONPATH": os.getcwd()}))

    for _ in range(6):
        start()
    until = time.monotonic() + 60
    while not all(output.stat().st_size for output in outputs) and time.monotonic() < until:
        time.sleep(0.01)
    for _ in range(20):
        time.sleep(source.uniform(0, 0.1))
        victim = processes.pop(source.randrange(len(processes)))
        assert victim.poll() is None
        victim.kill()
        victim.wait()
        start()
    for process in processes:
        process.kill()
        process.wait()
    said = seen(path)
    assert len(said) == len(set(said))
    for who, output in enumerate(outputs):
        told = output.read_bytes().count(b"\n")
        mine = [say for say in said if say.startswith(f"{who}.")]
        assert mine[:told] == [f"{who}.{number + 1}" for number in range(told)]
        assert len(mine) <= told + 1  # the last line may be unacknowledged


# -- file systems that cannot be written --------------------------------------------------------------------------


def test_full_disk_is_reported_and_existing_lines_are_kept(path: Path) -> None:
    study = open_study(path)
    study.tell(study.ask(), 1.0)
    full = path.stat().st_size + 100
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (full, limits[1]))
    try:
        with pytest.raises(RunDirectoryError, match=r"cannot write to the sweep's journal .*journal\.jsonl.*resume"):
            study.ask()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == full  # half a line
    study.tell(study.ask(), 2.0)
    assert [(trial.number, trial.value) for trial in open_study(path).trials] == [(0, 1.0), (1, 2.0)]


def test_unwritable_directory_is_reported_with_its_path() -> None:
    with pytest.raises(RunDirectoryError, match=r"cannot write to the sweep's journal /sys/journal\.jsonl"):
        JournalFile("/sys/journal.jsonl").append([{"say": 1}])


def test_append_to_a_missing_directory_is_reported(tmp_path: Path) -> None:
    assert list(JournalFile(tmp_path / "gone" / "journal.jsonl").lines()) == []
    with pytest.raises(RunDirectoryError, match="directory no longer exists"):
        JournalFile(tmp_path / "gone" / "journal.jsonl").append([{"say": 1}])


# -- as Optuna's storage ------------------------------------------------------------------------------------------


def test_hpcaccel_lines_are_hidden_from_optuna(path: Path) -> None:
    study = open_study(path)
    journal = Journal(path)
    first = study.ask()
    journal.note("budget", gpu_seconds=5.0)
    study.tell(first, 1.0)
    journal.note("budget", gpu_seconds=6.0)
    second = study.ask()
    assert second.number == 1
    assert [trial.number for trial in open_study(path).trials] == [0, 1]
    assert path.read_text().count('{"hpcaccel":"budget"') == 2


def test_operation_refused_by_optuna_leaves_the_storage_usable(path: Path) -> None:
    study, other = open_study(path), open_study(path)
    trial = study.ask()
    other.tell(trial.number, 1.0)
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        study._storage.set_trial_user_attr(trial._trial_id, "key", 1)
    other.tell(other.ask(), 2.0)
    study.tell(study.ask(), 3.0)
    assert [one.value for one in study.trials] == [one.value for one in other.trials] == [1.0, 2.0, 3.0]


def test_only_the_end_of_a_trial_is_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    append = JournalFile.append

    def watched(self: JournalFile, lines: Any, *, sync: bool = False) -> None:
        synced.append(sync)
        append(self, lines, sync=sync)

    study = open_study(path)
    monkeypatch.setattr(JournalFile, "append", watched)
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    assert not any(synced)
    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    assert synced[-1]


def test_a_journal_can_be_pickled(path: Path) -> None:
    study = open_study(path)
    study.tell(study.ask(), 1.0)
    again = pickle.loads(pickle.dumps(study))
    again.tell(again.ask(), 2.0)
    assert len(study.trials) == 2
