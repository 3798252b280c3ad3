"""Tests of stack dumps: requesting and reading them, and grouping ranks with equal stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hpcaccel
from hpcaccel.core.durable_files import write_json
from hpcaccel.core.rank_records import Beat
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.view.stack_groups import group, newest_dump, request_dump, wait_for_dump

from .conftest import HandMade

MAIN, OTHER = "0x00000000000000aa", "0x00000000000000bb"
WAITS = [
    'File "/x/torch/distributed/distributed_c10d.py", line 2800 in all_reduce',
    'File "train.py", line 31 in <module>',
]
READS = ['File "/data/reading.py", line 8 in fetch', 'File "train.py", line 20 in <module>']


def dump(main: list[str], *, current: str = OTHER, time: bool = False) -> str:
    """A dump as faulthandler writes it: the newest thread first."""
    text = "\n2026-11-21T07:10:37 rank 0\n" if time else ""
    for name, calls in ((OTHER, ['File "threading.py", line 331 in wait']), (MAIN, main)):
        text += f"{'Current thread' if name == current else 'Thread'} {name} (most recent call first):\n"
        text += "".join(f"  {call}\n" for call in calls) + ("\n" if name == OTHER else "")
    return text


def ranks(run: RunDir, *texts: str) -> None:
    for folder in (run.heartbeats(1), run.stacks(1)):
        folder.mkdir(parents=True)
    for rank, text in enumerate(texts):
        facts: dict[str, Any] = {"phase": "training", "step": 7, "thread": MAIN}
        beat = Beat(rank=rank, host=f"n{rank // 2}", pid=1, number=1, time=0, interval_seconds=0.1, **facts)
        write_json(run.heartbeats(1) / f"{rank}.json", to_dict(beat))
        (run.stacks(1) / f"{rank}.txt").write_text(text)


def test_ranks_with_equal_stacks_are_grouped_smallest_group_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    ranks(run, *(dump(READS if rank == 3 else WAITS) for rank in range(5)))
    odd, rest = group(newest_dump(run, 1))
    assert (odd.ranks, odd.nodes, odd.waits) == ((3,), ("n1",), False)
    assert odd.calls == ("/data/reading.py:8 in fetch", "train.py:20 in <module>")
    assert (rest.ranks, rest.nodes, rest.waits) == ((0, 1, 2, 4), ("n0", "n1", "n2"), True)


def test_rank_in_a_collective_of_the_script_is_waiting(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    folder = Path(hpcaccel.__file__).parent / "runtime/distributed/collectives"
    assert (folder / "exchange.py").is_file()
    ranks(run, dump([f'File "{folder}/exchange.py", line 100 in call', WAITS[1]]))
    (found,) = group(newest_dump(run, 1))
    assert found.waits


def test_of_equal_sized_groups_the_one_not_waiting_is_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    ranks(run, dump(WAITS), dump(READS))
    assert [one.ranks for one in group(newest_dump(run, 1))] == [(1,), (0,)]


def test_last_of_several_dumps_is_used_with_and_without_time_line(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    ranks(
        run,
        dump(WAITS) + dump(READS),
        dump(WAITS, time=True) + dump(READS, time=True),
        dump(WAITS, time=True) + dump(READS, current=MAIN),
        dump(WAITS) + dump(READS, time=True),
    )
    (found,) = group(newest_dump(run, 1))
    assert found.ranks == (0, 1, 2, 3)
    assert found.calls[0] == "/data/reading.py:8 in fetch"
    assert [len(one.threads) for one in newest_dump(run, 1)] == [2, 2, 2, 2]


def test_rank_without_a_dump_is_omitted(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    ranks(run, "", dump(WAITS))
    assert [one.rank for one in newest_dump(run, 1)] == [1]


def test_ranks_that_write_no_dump_are_returned(hand_made: HandMade, monkeypatch: Any) -> None:
    monkeypatch.setattr("hpcaccel.view.stack_groups.STACKS_TIMEOUT_SECONDS", 0.5)
    run = hand_made.run
    assert request_dump(run, 1) == {}
    assert list(run.control.iterdir()) == []  # no request without heartbeat files
    ranks(run, dump(WAITS), "")
    before = request_dump(run, 1)
    assert [path.name.partition("-")[0] for path in run.control.iterdir()] == ["stacks"]
    with (run.stacks(1) / "0.txt").open("a") as file:
        file.write(dump(READS))
    assert wait_for_dump(run, 1, before) == [1]
