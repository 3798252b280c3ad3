"""Tests of the merged log and of the traceback of the rank that failed first."""

from __future__ import annotations

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.records import Hang, to_dict
from hpcaccel.view.merged_log import first_traceback, merged_log

TRACEBACK = b"""step 12
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 8, in <module>
[rank1]:     main()
[rank1]: KeyError: 'x'

[rank1]: The above exception was the direct cause of the following exception:

[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 9, in <module>
[rank1]:     main()
[rank1]: IndexError: index 7 is out of bounds
srun: error: n1: task 1: Exited with exit code 1
"""


def fail(run, detail, error_class="exception", **facts):
    run.end(1, reason="failed", error_class=error_class, detail=detail, **facts)


def test_lines_of_all_ranks_in_the_order_of_their_times(hand_made):
    hand_made.start(1)
    hand_made.log(1, "supervisor", b"2026-11-23T10:00:00 attempt 1: ranks: 2\n2026-11-23T10:00:30 attempt 1 ended\n")
    hand_made.log(1, 0, b"2026-11-23 10:00:10,500 step 1\nloss 2.5\n2026-11-23 10:00:20,000 step 2\n")
    hand_made.log(1, 1, b"2026-11-23 10:00:15,000 step 1\n")

    assert [(line.sources, line.text[20:]) for line in merged_log(hand_made.run)] == [
        (["supervisor"], "attempt 1: ranks: 2"), (["0"], "500 step 1"), (["0"], ""), (["1"], "000 step 1"),
        (["0"], "000 step 2"), (["supervisor"], "attempt 1 ended"),
    ]  # fmt: skip
    assert [line.text for line in merged_log(hand_made.run, limit=1)] == ["2026-11-23T10:00:30 attempt 1 ended"]


def test_equal_lines_of_ranks_are_joined(hand_made):
    hand_made.start(1)
    for rank in range(3):
        hand_made.log(1, rank, b"downloading\n")

    assert [(line.sources, line.text) for line in merged_log(hand_made.run, 1)] == [(["0", "1", "2"], "downloading")]


def test_run_without_logs_has_an_empty_log(hand_made):
    assert merged_log(hand_made.run) == []
    assert merged_log(hand_made.run, 7) == []
    assert first_traceback(hand_made.run) is None


def test_traceback_of_the_rank_in_the_failure(hand_made):
    hand_made.start(1)
    hand_made.log(1, 0, b"Traceback (most recent call last):\nRuntimeError: connection closed by peer\n")
    hand_made.log(1, 1, TRACEBACK)
    fail(hand_made, "rank 1 on n1: IndexError: index 7 is out of bounds")
    rank, text = first_traceback(hand_made.run)

    assert rank == 1
    assert text.splitlines()[0] == "Traceback (most recent call last):"
    assert "KeyError: 'x'" in text
    assert text.splitlines()[-1] == "IndexError: index 7 is out of bounds"


def test_rank_of_the_end_line_counts_more_than_the_detail(hand_made):
    hand_made.start(1)
    for rank in (0, 1):
        hand_made.log(1, rank, b"Traceback (most recent call last):\nRuntimeError: of rank %d\n" % rank)
    fail(hand_made, "rank 0: RuntimeError: ranks differ", rank_blamed=1)

    assert first_traceback(hand_made.run) == (1, "Traceback (most recent call last):\nRuntimeError: of rank 1")


def test_end_of_log_of_a_rank_without_traceback(hand_made):
    hand_made.start(1)
    hand_made.log(1, 1, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    fail(hand_made, "rank 1: Aborted")

    assert first_traceback(hand_made.run) == (1, "terminate called after throwing an instance of 'std::bad_alloc'")


def test_stacks_of_the_rank_that_hangs(hand_made):
    hand_made.start(1)
    hand_made.run.stacks(1).mkdir()
    (hand_made.run.stacks(1) / "1.txt").write_text("MainThread\n  train.py:9\n")
    write_json(hand_made.run.hang(1), to_dict(Hang(why="rank 1 makes no progress", culprit_rank=1)))
    fail(hand_made, "rank 1 makes no progress", error_class="hang")

    assert first_traceback(hand_made.run) == (1, "MainThread\n  train.py:9")


def test_run_that_was_stopped_has_no_traceback(hand_made):
    hand_made.start(1)
    hand_made.log(1, 0, TRACEBACK)
    hand_made.end(1, reason="stop", decision="pause")

    assert first_traceback(hand_made.run) is None


def test_only_the_end_of_a_large_log_is_read(hand_made):
    hand_made.start(1)
    hand_made.log(1, 0, b"x" * 99 + b"\n" + b"%099d\n" * 20_000 % tuple(range(20_000)))

    lines = merged_log(hand_made.run, limit=10_000)
    assert int(lines[-1].text) == 19_999
    assert len(lines) < 3_000
