"""``save_state`` and ``load_state``: called on all ranks, on some, late, with numbered directories and with hooks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.checkpointing.save_participants import CollectiveCall, ParticipantTable, SaveParticipants
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.distributed.rank_env import RankEnvironment
from tests.runtime.ranks import make_run, run_ranks

pytestmark = pytest.mark.torch


def test_replicated_ranks_save_together_alone_late_numbered_and_with_hooks(tmp_path: Path) -> None:
    for name in ("only_the_main_process_calls", "a_rank_comes_late", "numbered", "hooks", "misuse"):
        run = make_run(tmp_path / "runs" / name, runtime={"save_wait_seconds": 1.5})
    ended = run_ranks("saving.py", [str(tmp_path)], run=run)
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    told = ended.result()
    assert "saving.py:" in told["warning"]
    assert "was not called by rank 1" in told["warning"]
    assert "is_main_process" in told["warning"]
    assert told["after"] is None
    assert "rank 1 did not take part in the save" in ended.outputs[0]


class Meeting:
    """Two ranks in threads that share a store."""

    def __init__(self) -> None:
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self.ranks = [SaveParticipants(self._group(rank)) for rank in range(2)]

    def _group(self, rank: int) -> RankGroup:
        env = RankEnvironment(
            rank=rank,
            world_size=2,
            local_rank=rank,
            local_world_size=2,
            master_addr="",
            master_port=0,
            source="torchrun",
        )
        return RankGroup(env, torch.device("cpu"), None, store=self._store)

    def attend(
        self, rank: int, call: CollectiveCall, *, needs_all: bool = False, seconds: float = 5.0
    ) -> ParticipantTable:
        return self.ranks[rank].attend(call, needs_all=needs_all, patience=seconds, limit=seconds)

    def both(
        self, first: CollectiveCall, second: CollectiveCall, **options: bool
    ) -> list[ParticipantTable | Exception]:
        found: dict[int, ParticipantTable | Exception] = {}

        def come(rank: int, call: CollectiveCall) -> None:
            try:
                found[rank] = self.attend(rank, call, **options)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=come, args=item) for item in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(2)]


def call(where: str = "", *, step: int = 1, line: int = 10) -> CollectiveCall:
    return CollectiveCall("save_state()", where, step, [f"train.py:{line}"])


def test_ranks_that_call_in_time_take_part_in_the_save() -> None:
    meeting = Meeting()
    for number in (1, 2):
        assert meeting.both(call(step=number), call(step=number)) == [ParticipantTable(number, [], "")] * 2


def test_directory_of_rank_0_is_used_if_ranks_pass_different_directories() -> None:
    assert Meeting().both(call("at-12:01"), call("at-12:02")) == [ParticipantTable(1, [], "at-12:01")] * 2


def test_late_rank_gets_the_result_once_and_joins_the_next_save() -> None:
    meeting = Meeting()
    assert meeting.attend(0, call(), seconds=0) == ParticipantTable(1, [1], "")
    meeting.ranks[0].report(1, done="step_1")
    assert meeting.attend(1, call()) == ParticipantTable(1, [1], "")
    assert meeting.ranks[1].result(1, limit=1) == "step_1"
    assert meeting.both(call(), call()) == [ParticipantTable(2, [], "")] * 2


def test_rank_that_missed_saves_at_one_line_is_not_late_at_another_line() -> None:
    meeting = Meeting()
    for step in (1, 2):
        assert meeting.attend(0, call(step=step), seconds=0).missing == [1]
    assert meeting.both(call(step=3, line=20), call(step=3, line=20)) == [ParticipantTable(3, [], "")] * 2


def test_call_that_needs_all_ranks_fails_if_a_rank_waits_in_another_call() -> None:
    meeting = Meeting()

    def wait() -> None:
        with pytest.raises(RuntimeMisuse, match="rank 0 did not reach this call"):
            meeting.attend(1, call("b", line=20), seconds=1)

    waits = threading.Thread(target=wait)
    waits.start()
    with pytest.raises(RuntimeMisuse, match=r"py:10: rank 1 did not reach .*; rank 1 is waiting .* at train\.py:20"):
        meeting.attend(0, call("a"), needs_all=True, seconds=60)
    waits.join()


def test_failed_save_on_rank_0_raises_on_the_late_rank() -> None:
    meeting = Meeting()
    assert not meeting.attend(0, call(), seconds=0).complete
    meeting.ranks[0].report(1, problem="disk full")
    assert meeting.attend(1, call()).meeting == 1
    with pytest.raises(CheckpointError, match=r"disk full \(on rank 0\)"):
        meeting.ranks[1].result(1, limit=1)
    with pytest.raises(CheckpointError, match="did not report"):
        meeting.ranks[1].result(2, limit=0)


def test_rank_1_stops_waiting_for_rank_0_at_the_time_limit() -> None:
    meeting = Meeting()
    with pytest.raises(RuntimeMisuse, match="rank 0 did not reach this call within 0 s"):
        meeting.attend(1, call(), seconds=0)
    assert meeting.attend(0, call(), seconds=0).missing == [1]
