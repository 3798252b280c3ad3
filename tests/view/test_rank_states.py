"""Tests of the states of ranks: which rank is at fault for a failure, and what is on top of the log."""

from __future__ import annotations

import pytest

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.records import AttemptEnd, AttemptStart, Hang, from_dict, to_dict
from hpcaccel.view.merged_log import first_traceback, merged_log
from hpcaccel.view.rank_states import RankState, blame_of, rank_states

from ..node.conftest import local_run  # noqa: F401 - a fixture

RANK_2_FAILS = """
import os, signal, sys, time
rank, together = int(os.environ["RANK"]), os.path.join(os.path.dirname(os.path.abspath(__file__)), "ready")
def interrupted(*_):
    raise RuntimeError(f"rank {rank} was interrupted")
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
signal.signal(signal.SIGTERM, interrupted)
print("ready", flush=True)
open(f"{together}{rank}", "w").close()
while not all(os.path.exists(f"{together}{other}") for other in range(4)):
    time.sleep(0.02)
if rank == 2:
    {}["learning_rate"]
time.sleep(300)
"""


def states(made, **end):
    made.start(1)
    made.end(1, **{"reason": "failed", "error_class": "exception", **end})
    start = AttemptStart(attempt=1, time=1000.0, job_id="local-1", nodes=["n1", "n2"], ranks=4)
    line = AttemptEnd(**{"attempt": 1, "time": 2.0, "reason": "failed", "decision": "end", **end})
    return [rank.state for rank in rank_states(made.run, start, line, active=False)]


@pytest.mark.parametrize(
    ("end", "blamed"),
    [
        ({"error_class": "exception", "rank_blamed": 2, "detail": "rank 2 on n2: KeyError: 'lr'"}, [2]),
        ({"error_class": "exception", "detail": "rank 2 on n2: KeyError: 'lr'"}, [2]),  # of an earlier release
        ({"error_class": "exception", "detail": "failed 3 times; the last one: rank 1: KeyError: 'lr'"}, [1]),
        ({"error_class": "gloo_timeout", "detail": "rank 0: Connection closed by peer"}, []),
        ({"error_class": "gloo_timeout", "rank_blamed": 3, "detail": "rank 3: exited without an exception"}, [3]),
        ({"error_class": "gpu_error", "rank_blamed": 2, "nodes_blamed": ["n2"], "detail": "rank 2: Xid 79"}, [2]),
        ({"error_class": "preflight", "nodes_blamed": ["n2"], "detail": "n2: no GPU"}, [2, 3]),
        ({"reason": "stop", "error_class": None, "detail": "stopped at step 4"}, []),
        ({"error_class": "setup", "detail": "the setup failed"}, []),
    ],
)
def test_rank_that_failed_is_at_fault(hand_made, end, blamed):
    assert states(hand_made, **end) == ["blamed" if rank in blamed else "ended" for rank in range(4)]


@pytest.mark.parametrize(
    ("blamed", "error_class", "title"),
    [
        ([2], "exception", "Rank 2 failed first"),
        ([2], "hang", "Rank 2 is the one that the others wait for"),
        ([], "exception", "Rank 2 failed"),  # no rank is known to be at fault
        ([1], "exception", "Rank 2 failed"),
        ([2, 3], "preflight", "Rank 2 failed"),  # a node is at fault: all of its ranks
    ],
)
def test_title_of_a_traceback_claims_no_more_than_is_known(blamed, error_class, title):
    ranks = [
        RankState(
            rank=rank, node="n1", local_rank=rank, step=None, step_seconds=None,
            state="blamed" if rank in blamed else "ended",
        )
        for rank in range(4)
    ]  # fmt: skip
    assert blame_of(2, ranks, error_class) == title


def test_rank_that_others_waited_for_is_at_fault_for_a_hang(hand_made):
    hand_made.start(1)
    write_json(hand_made.run.hang(1), to_dict(Hang(why="rank 3 makes no progress", culprit_rank=3)))
    start = AttemptStart(attempt=1, time=1000.0, job_id="local-1", nodes=["n1"], ranks=4)
    end = AttemptEnd(attempt=1, time=2.0, reason="failed", decision="end", error_class="hang")
    assert [rank.state for rank in rank_states(hand_made.run, start, end, active=False)].index("blamed") == 3


def test_first_of_four_ranks_to_fail_is_blamed_and_its_traceback_comes_first(local_run):  # noqa: F811
    made = local_run(RANK_2_FAILS, ranks=4, restart_in_place=0, max_failures=1)
    assert made.run() == 1

    line = made.lines("end")[0]
    assert (line["error_class"], line["rank_blamed"]) == ("exception", 2)
    assert line["detail"].endswith("rank 2: KeyError: 'learning_rate'")
    start, end = from_dict(AttemptStart, made.lines("start")[0]), from_dict(AttemptEnd, line)
    shown = rank_states(made.dir, start, end, active=False)
    assert [rank.state for rank in shown] == ["ended", "ended", "blamed", "ended"]
    rank, text = first_traceback(made.dir)
    assert (rank, text.splitlines()[-1]) == (2, "KeyError: 'learning_rate'")
    assert any("rank 0 was interrupted" in one.text for one in merged_log(made.dir))  # failed too, but later
