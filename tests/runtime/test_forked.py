"""Forked ranks behave like ranks with a new Python process: the same programs run in both ways."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .ranks import Ended, Ranks, run_ranks

pytestmark = pytest.mark.torch

PLACE = (Path(__file__).parent / "programs" / "process_state.py").read_text()


def place(tmp_path: Path, *, fresh: bool, **options: Any) -> tuple[dict[str, Any], list[str]]:
    program = tmp_path / "place.py"
    program.write_text(PLACE)
    ended = run_ranks(str(program), ["one", "two words"], fresh=fresh, **options)
    assert ended.codes == [0, 0], ended.outputs
    return ended.result(), [line for line in ended.outputs[1].splitlines() if not line.startswith("{")]


@pytest.mark.parametrize("blocked", [False, True], ids=["signals", "blocked signals"])
def test_forked_rank_has_the_same_process_state_as_a_new_python(
    blocked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path, fresh=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEW_SINCE", "the template began")
    monkeypatch.delenv("HOME")
    forked, said = place(tmp_path, fresh=False, blocked=blocked)
    assert forked["variables"]["NEW_SINCE"] == "the template began"
    assert "HOME" not in forked["variables"]
    started, wanted = place(tmp_path, fresh=True, blocked=blocked)
    assert said == wanted
    for name in started:
        assert forked[name] == started[name]


ENDS = {
    "falls off its end": "print('fine')",
    "says a code": "raise SystemExit(85)",
    "says why": "import sys; sys.exit('no data')",
    "raises": "def f():\n    1 / 0\nf()",
    "is no Python": "def f(:",
    "fails at exit": "import atexit; atexit.register(lambda: print('heard')); raise ValueError('x')",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "is terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "is interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)",
    "leaves at once": "import os; print('never seen'); os._exit(3)",
}


def end(tmp_path: Path, text: str, *, fresh: bool) -> Ended:
    program = tmp_path / "end.py"
    program.write_text(text)
    return run_ranks(str(program), size=1, launcher="alone", fresh=fresh)


@pytest.mark.parametrize("name", ENDS)
def test_forked_rank_ends_like_a_new_python(name: str, tmp_path: Path) -> None:
    forked, started = (end(tmp_path, ENDS[name], fresh=fresh) for fresh in (False, True))
    assert forked.codes == started.codes
    lines, wanted = (ended.outputs[0].splitlines() for ended in (forked, started))
    assert [line for line in lines if line in wanted] == wanted, lines
    if len(lines) != len(wanted):  # a traceback begins with the template's own frames
        assert any('template.py", line ' in line for line in lines)


def test_neighbouring_ranks_have_different_hash_seeds(tmp_path: Path) -> None:
    program = tmp_path / "order.py"
    program.write_text("print(hash('word'))")
    assert len(set(run_ranks(str(program)).outputs)) == 2


def test_random_numbers_differ_from_rank_to_rank(tmp_path: Path) -> None:
    program = tmp_path / "draws.py"
    program.write_text("import numpy, random\nprint(numpy.random.random(), random.random())")
    assert len(set(run_ranks(str(program), size=3).outputs)) == 3


def test_variables_read_at_start_up_cause_a_new_python_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "flags.py"
    program.write_text("import sys; print(sys.flags.dev_mode)")
    assert run_ranks(str(program)).outputs == ["False\n"] * 2
    monkeypatch.setenv("PYTHONDEVMODE", "1")
    assert run_ranks(str(program)).outputs == ["True\n"] * 2


def test_forked_process_can_be_waited_for_and_signalled(tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text("import time\nprint('waits', flush=True)\ntime.sleep(600)")
    (process,) = Ranks(str(program), size=1).processes
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.01)
    os.kill(process.pid, 0)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.wait() == process.poll() == process.returncode == -signal.SIGUSR1
    assert "waits\n".startswith(output), "the signal may arrive before or within the line"
    process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
