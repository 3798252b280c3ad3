"""Tests of reading and following the logs of ranks."""

from __future__ import annotations

import io

import pytest

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.launch_spec import LaunchComponent, LaunchSpec
from hpcaccel.errors import UserError
from hpcaccel.view.log_reader import Logs, copy_logs


def shown(logs: Logs) -> bytes:
    out = io.BytesIO()
    copy_logs(logs, out)
    return out.getvalue()


@pytest.fixture
def two_attempts(hand_made):
    hand_made.start(1)
    hand_made.log(1, 0, b"one zero\n")
    hand_made.log(1, 1, b"one one\n")
    hand_made.start(2)
    hand_made.log(2, 0, b"two zero\n")
    hand_made.log(2, 1, b"two one\nand more")
    hand_made.log(2, "supervisor", b"watching\n")
    return hand_made


def test_rank_0_of_the_newest_attempt_is_shown(two_attempts):
    assert shown(Logs(two_attempts.run)) == b"two zero\n"


def test_log_of_selected_rank_and_attempt_is_shown(two_attempts):
    assert shown(Logs(two_attempts.run, rank="1")) == b"two one\nand more"
    assert shown(Logs(two_attempts.run, rank="1", attempt=1)) == b"one one\n"
    assert shown(Logs(two_attempts.run, rank="supervisor")) == b"watching\n"


def test_lines_of_all_ranks_are_prefixed_with_the_rank(two_attempts):
    assert shown(Logs(two_attempts.run, rank="all")) == b"[0] two zero\n[1] two one\n[1] and more"


def test_log_bytes_are_copied_unchanged(hand_made):
    hand_made.start(1)
    raw = b"10%\r20%\r\x1b[31mred\x1b[0m \xff\xfe\x00 \xe2\x80\xa8\n"
    hand_made.log(1, 0, raw)
    assert shown(Logs(hand_made.run)) == raw
    assert shown(Logs(hand_made.run, rank="all")) == b"[0] " + raw


def test_ranks_are_sorted_by_number(hand_made):
    hand_made.start(1)
    for rank in (10, 2, 0):
        hand_made.log(1, rank, b"here\n")
    assert shown(Logs(hand_made.run, rank="all")) == b"[0] here\n[2] here\n[10] here\n"


def test_following_continues_in_the_next_attempt(hand_made):
    hand_made.start(1)
    hand_made.log(1, 0, b"a\nb")
    out = io.BytesIO()
    looks = 0

    def later(_seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            assert out.getvalue() == b"a\n"  # the line "b" is incomplete
            hand_made.log(1, 0, b"c\n")
        elif looks == 2:
            hand_made.start(2)
            hand_made.log(2, 0, b"again\nlast words")

    copy_logs(Logs(hand_made.run), out, ended=lambda: looks >= 3, sleep=later)

    assert out.getvalue() == b"a\nbc\nagain\nlast words"


def test_copy_logs_returns_zero_without_output(hand_made):
    assert copy_logs(Logs(hand_made.run), io.BytesIO()) == 0


def test_rank_batch_shows_output_of_the_batch_script(hand_made):
    hand_made.run.slurm_log.write_text("module: command not found\n")
    assert shown(Logs(hand_made.run, rank="batch")) == b"module: command not found\n"


def test_component_name_shows_output_of_its_processes(two_attempts):
    launch = LaunchSpec(
        kind="program", program=["train"], workdir="/", backend="slurm", nodes=1, ranks_per_node=1, stop="signals",
        components=[LaunchComponent(name="data")],
    )  # fmt: skip
    write_json(two_attempts.run.spec, {"launch": launch.to_dict()})
    for process, text in enumerate([b"serving\n", b"me too\n"]):
        two_attempts.log(2, f"data-{process}", text)
    assert shown(Logs(two_attempts.run, rank="data")) == b"[data-0] serving\n[data-1] me too\n"
    with pytest.raises(UserError, match="'date' is not a rank: use a number, 'all', 'supervisor', 'batch' or 'data'"):
        Logs(two_attempts.run, rank="date")


def test_invalid_rank_is_rejected(hand_made):
    with pytest.raises(UserError, match="'zero' is not a rank"):
        Logs(hand_made.run, rank="zero")
