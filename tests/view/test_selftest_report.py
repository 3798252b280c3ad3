"""The verdict of a self-test, computed from results as the ranks write them."""

from __future__ import annotations

import io
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.view.selftest_blame import blamed_for_links, slow_links
from hpcaccel.view.selftest_problems import ADVICE
from hpcaccel.view.selftest_report import print_verdict, verdict_json
from hpcaccel.view.selftest_results import SelftestResults, read_results
from hpcaccel.view.selftest_verdict import SelftestVerdict, judge

PACKAGE = Path(__file__).resolve().parents[2] / "hpcaccel"


class Written:
    """Results of ranks, each on a node of its own: n0, n1 …"""

    def __init__(self, folder: Path, size: int, *, world_sizes: dict[int, int] | None = None) -> None:
        self.folder = folder
        self.size = size
        self.clock = 1000.0
        for rank in range(size):
            count = (world_sizes or {}).get(rank, size)
            self.check(rank, "environment", data={"world_size": count, "places": [f"n{one}" for one in range(size)]})

    def line(self, rank: int, check: str, state: str, **fields: Any) -> None:
        self.clock += 1
        line = {"selftest": 1, "rank": rank, "node": f"n{rank}", "pid": 100 + rank, "time": self.clock}
        with (self.folder / f"rank-{rank}.n{rank}.{100 + rank}.jsonl").open("a") as file:
            file.write(json.dumps({**line, "check": check, "state": state, **fields}) + "\n")

    def check(self, rank: int, name: str, state: str = "ok", *faults: dict[str, Any], **fields: Any) -> None:
        self.line(rank, name, "began")
        for number in range(fields.pop("steps", 0)):
            self.line(rank, name, "step", message=f"step {number}")
        self.line(rank, name, state, seconds=0.5, faults=faults, **{"data": {}, **fields})

    def end(self, *ranks: int) -> SelftestVerdict:
        for rank in ranks or range(self.size):
            self.line(rank, "end", "ok")
        return judge(self.results())

    def results(self) -> SelftestResults:
        return read_results(self.folder)

    def links(self, speeds: dict[tuple[int, int], float], *, usual: float = 1000.0, usual_us: float = 5.0) -> None:
        for rank in range(self.size):
            found = [
                {"other": other, "latency_us": usual_us, "mb_per_s_there": usual * 1.1,
                 "mb_per_s_back": speeds.get((rank, other), usual)}
                for other in range(rank + 1, self.size)
            ]  # fmt: skip
            self.check(rank, "pairs", data={"links": found})


def fault(kind: str, message: str = "it happened", *, ranks: list[int], severity: str = "bad") -> dict[str, Any]:
    return {"kind": kind, "message": message, "severity": severity, "ranks": ranks}


def bad(verdict: SelftestVerdict) -> dict[str, list[str]]:
    return {node.name: [problem.kind for problem in node.problems] for node in verdict.nodes if node.verdict == "bad"}


def test_without_problems_all_nodes_are_ok(tmp_path: Path) -> None:
    written = Written(tmp_path, 3)
    written.links({})
    verdict = written.end()
    assert (verdict.verdict, [node.verdict for node in verdict.nodes]) == ("ok", ["ok"] * 3)
    assert [(node.latency_us, node.mb_per_s) for node in verdict.nodes] == [(5.0, 1000.0)] * 3


def test_without_any_result_the_verdict_is_bad(tmp_path: Path) -> None:
    assert judge(read_results(tmp_path)).verdict == "bad"
    verdict = judge(read_results(tmp_path / "missing", expected=2, places=["here", "here"]))
    assert bad(verdict) == {"here": ["never_started"] * 2}


# -- who is to blame ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [[3], [2, 5], [0]])
def test_nodes_all_of_whose_links_are_slow_are_blamed(tmp_path: Path, slow: list[int]) -> None:
    written = Written(tmp_path, 6)
    written.links({pair: 90.0 for pair in combinations(range(6), 2) if set(pair) & set(slow)})
    verdict = written.end()
    assert bad(verdict) == {f"n{one}": ["slow_link"] for one in slow}


def test_one_slow_link_is_a_warning_at_both_ends(tmp_path: Path) -> None:
    written = Written(tmp_path, 4)
    written.links({(1, 2): 90.0})
    verdict = written.end()
    assert {node.name: node.verdict for node in verdict.nodes} == {
        "n0": "ok", "n1": "warning", "n2": "warning", "n3": "ok"
    }  # fmt: skip
    assert "n1 – n2: 90 MB/s" in verdict.problems[0].message


def test_only_link_of_two_nodes_is_compared_with_gigabit_ethernet(tmp_path: Path) -> None:
    written = Written(tmp_path, 2)
    written.links({(0, 1): 60.0})
    verdict = written.end()
    assert (verdict.verdict, [problem.kind for problem in verdict.problems]) == ("warning", ["slow_network"] * 2)


def test_links_with_long_latencies_are_slow() -> None:
    links = {("a", "b"): 10.0, ("a", "c"): 5000.0, ("b", "c"): 5000.0}
    assert slow_links({}, links) == {("a", "c"), ("b", "c")}
    assert slow_links({}, {link: value / 10 for link, value in links.items()}) == set(), "within the noise"


@pytest.mark.parametrize(
    ("links", "blamed", "left"),
    [
        ([], [], []),
        ([("a", "b")], [], [("a", "b")]),
        ([("a", "c"), ("b", "c")], ["c"], []),
        ([("a", "c"), ("b", "c"), ("d", "e")], ["c"], [("d", "e")]),
        ([("c", "c")], ["c"], []),
    ],
)
def test_end_with_several_bad_links_explains_them(links: Any, blamed: list[str], left: Any) -> None:
    assert blamed_for_links(links) == (blamed, left)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({0: {"2": ["all_gather"]}, 1: {"2": ["all_gather"]}}, "sent"),
        ({2: {"0": ["all_reduce"], "1": ["all_reduce"], "2": ["all_reduce"]}}, "received"),
    ],
)
def test_wrong_results_name_the_sender_or_the_receiver(tmp_path: Path, wrong: Any, kind: str) -> None:
    written = Written(tmp_path, 3)
    for rank in range(3):
        faults = [fault("wrong_result", ranks=[])] if rank in wrong else []
        written.check(rank, "collectives", "ok", *faults, data={"wrong": wrong.get(rank, {})})
    verdict = written.end()
    assert bad(verdict) == {"n2": ["wrong_result"]}
    assert f"rank 2 {kind} wrong numbers" in verdict.problems[0].message


@pytest.mark.parametrize(
    ("size", "complaints", "expected", "words"),
    [
        (3, {0: [2], 1: [2]}, ["n2"], "2 links of this node are corrupt (n0 – n2: wrong contents from rank 2 at "),
        (3, {2: [0, 1]}, ["n2"], "2 links of this node are corrupt (n0 – n2: wrong contents from rank 0 at "),
        (2, {0: [1]}, ["n0", "n1"], "the link is corrupt, and one of the two nodes is at fault (n0 – n1: "),
        (4, {3: [1]}, ["n1", "n3"], "the link is corrupt, and one of the two nodes is at fault (n1 – n3: "),
        (1, {0: [0]}, ["n0"], "1 link of this node is corrupt (n0 – n0: "),
    ],
)
def test_wrong_contents_are_the_fault_of_the_node_with_most_such_partners(
    tmp_path: Path, size: int, complaints: dict[int, list[int]], expected: list[str], words: str
) -> None:
    written = Written(tmp_path, size)
    for rank in range(size):
        others = complaints.get(rank, [])
        faults = [fault("wrong_result", ranks=[]) for _ in others]
        written.check(rank, "pairs", "ok", *faults, data={"links": [], "wrong": others})
    verdict = written.end()
    assert bad(verdict) == {node: ["wrong_result"] for node in expected}
    assert verdict.problems[0].message.startswith(words)


def test_rank_0_that_no_rank_reaches_is_to_blame(tmp_path: Path) -> None:
    written = Written(tmp_path, 4)
    written.check(0, "rendezvous", "failed", fault("missing", ranks=[1, 2, 3]))
    for rank in (1, 2, 3):
        written.check(rank, "rendezvous", "failed", fault("unreachable", ranks=[rank]))
    assert bad(written.end()) == {"n0": ["unreachable"]}


def test_rank_that_never_started_explains_the_failed_rendezvous(tmp_path: Path) -> None:
    written = Written(tmp_path, 3)
    (tmp_path / "rank-2.n2.102.jsonl").unlink()
    written.check(0, "rendezvous", "failed", fault("missing", ranks=[2]))
    written.check(1, "rendezvous", "failed", fault("error", "could not complete the rendezvous", ranks=[]))
    verdict = written.end(0, 1)
    assert bad(verdict) == {"n2": ["never_started"]}
    assert verdict.consequences == ["n1: could not complete the rendezvous"]


def test_missing_rank_0_explains_that_the_others_cannot_reach_it(tmp_path: Path) -> None:
    written = Written(tmp_path, 3)
    (tmp_path / "rank-0.n0.100.jsonl").unlink()
    for rank in (1, 2):
        written.check(rank, "rendezvous", "failed", fault("unreachable", ranks=[rank]))
    assert bad(written.end(1, 2)) == {"n0": ["never_started"]}


@pytest.mark.parametrize("expected", [None, 3])
def test_rank_with_another_world_size_is_named(tmp_path: Path, expected: int | None) -> None:
    written = Written(tmp_path, 3, world_sizes={1: 8})
    for rank in range(3):
        written.line(rank, "end", "ok")
    verdict = judge(read_results(tmp_path, expected=expected))
    assert bad(verdict) == {"n1": ["world_size"]}
    assert "rank 0: 3, rank 1: 8, rank 2: 3" in verdict.problems[0].message


def test_error_on_all_ranks_without_a_known_cause_counts_for_all(tmp_path: Path) -> None:
    written = Written(tmp_path, 2)
    for rank in range(2):
        written.check(rank, "groups", "failed", fault("error", "NCCL is broken", ranks=[]))
    verdict = written.end()
    assert bad(verdict) == {"n0": ["error"], "n1": ["error"]}
    assert verdict.consequences == []


def test_of_the_ranks_over_the_limit_the_last_one_hung(tmp_path: Path) -> None:
    written = Written(tmp_path, 3)
    for rank in range(3):
        late = fault("timeout", f"late {rank}", ranks=[])
        written.check(rank, "training", "timeout", late, steps=1 if rank == 1 else 3)
    verdict = judge(written.results())
    assert bad(verdict) == {"n1": ["hung"]}
    assert "rank 1 hung in the check 'training' at 'step 0'" in verdict.problems[0].message


def test_killed_rank_is_named_with_its_signal_and_not_those_that_srun_killed(tmp_path: Path) -> None:
    written = Written(tmp_path, 2)
    for rank in range(2):
        written.line(rank, "pairs", "began")
        written.line(rank, "pairs", "step", message="pair with rank 0")
    written.line(1, "process", "killed", message="was killed by SIGKILL")
    verdict = judge(written.results())
    assert bad(verdict) == {"n1": ["ended_early"]}
    assert verdict.problems[0].message == ("rank 1 was killed by SIGKILL during the check 'pairs' (pair with rank 0)")


def test_node_that_no_node_reaches_is_named(tmp_path: Path) -> None:
    written = Written(tmp_path, 4)
    for rank in (0, 1, 3):
        missed = fault("no_connection", "cannot connect to n2 at 10.0.0.3:7: no reply within 5 s", ranks=[])
        written.check(rank, "connections", "ok", missed, data={"unreachable": [2]})
    verdict = written.end()
    assert bad(verdict) == {"n2": ["no_connection"]}
    assert "3 links of this node are broken (n0 cannot connect to n2" in verdict.problems[0].message


# -- measurements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "verdict"), [(50.0, "ok"), (-400.0, "warning"), (3000.0, "bad")])
def test_clock_is_compared_with_the_median(tmp_path: Path, offset: float, verdict: str) -> None:
    written = Written(tmp_path, 3)
    clocks = {"1": {"offset_ms": offset, "error_ms": 0.1}, "2": {"offset_ms": 0.2, "error_ms": 0.1}}
    written.check(0, "clocks", data={"clocks": clocks})
    found = written.end()
    assert [node.verdict for node in found.nodes] == ["ok", verdict, "ok"]


def test_wrong_clock_of_rank_0_is_its_own_problem(tmp_path: Path) -> None:
    written = Written(tmp_path, 3)
    written.check(0, "clocks", data={"clocks": {str(rank): {"offset_ms": 9000.0, "error_ms": 1.0} for rank in (1, 2)}})
    assert bad(written.end()) == {"n0": ["clock"]}


def test_node_with_another_driver_or_fewer_gpus_is_warned_of(tmp_path: Path) -> None:
    written = Written(tmp_path, 3)
    for rank in range(3):
        about = {"count": 4 - rank // 2, "names": ["H100"], "driver": "570.1" if rank else "565.9"}
        written.check(rank, "gpus", data=about)
    problems = written.end().problems
    assert [(problem.node, problem.kind, problem.message) for problem in problems] == [
        ("n2", "differs", "number of GPUs: 3 here, 4 on 2 other nodes"),
        ("n0", "differs", "GPU driver: 565.9 here, 570.1 on 2 other nodes"),
    ]


# -- output ------------------------------------------------------------------------------------------------------------


def test_table_names_the_node_the_problem_and_what_to_do(tmp_path: Path) -> None:
    written = Written(tmp_path, 2)
    full = fault("disk_full", "cannot write 8.4 MB to /scratch\x1b[31m (no space left)", ranks=[1])
    written.check(0, "disks")
    written.check(1, "disks", "failed", full)
    for rank in range(2):
        written.line(rank, "checkpoint", "skipped", message="a disk cannot be written")
    written.check(0, "collectives", data={"all_reduce": {"bytes": 4e6, "seconds": 0.002, "mb_per_s": 2000.0}})
    verdict = written.end()
    out = io.StringIO()
    print_verdict(verdict, written.results(), stream=out)
    assert out.getvalue().splitlines() == [
        "NODE  RANKS  VERDICT  LATENCY  BANDWIDTH  CLOCK  PROBLEMS",
        "n0    0      ok             -          -      -  -",
        "n1    1      bad            -          -      -  disk full",
        "all-reduce of 4.0 MB over 2 ranks: 2.00 ms, 2000 MB/s",
        "left out: checkpoint (a disk cannot be written)",
        "",
        "bad: n1: cannot write 8.4 MB to /scratch\\x1b[31m (no space left)",
        f"  to do: {ADVICE['disk_full']}",
        "",
        "bad: n1 (1 of 2 nodes)",
    ]


def test_json_has_nodes_links_and_checks(tmp_path: Path) -> None:
    written = Written(tmp_path, 2)
    written.links({})
    verdict = written.end()
    document = json.loads(json.dumps(verdict_json(verdict, written.results())))
    assert (document["version"], document["verdict"]) == (1, "ok")
    assert document["nodes"]["n1"]["ranks"] == [1]
    assert document["links"][0]["nodes"] == ["n0", "n1"]
    assert document["checks"]["pairs"] == {"states": {"ok": 2}, "seconds": 0.5}
    assert document["ranks"][0]["data"]["environment"]["world_size"] == 2


def test_lines_that_are_no_results_are_skipped(tmp_path: Path) -> None:
    written = Written(tmp_path, 1)
    with (tmp_path / "rank-0.n0.100.jsonl").open("a") as file:
        file.write('{"selftest": 1, "rank"')  # a rank was killed while it wrote
    assert written.results().processes[0].checks["environment"].state == "ok"


def test_every_kind_of_fault_in_the_program_has_advice() -> None:
    files = [*PACKAGE.glob("runtime/selftest/*.py"), *PACKAGE.glob("view/selftest_*.py")]
    kinds = {kind for path in files for kind in re.findall(r'kind="(\w+)"', path.read_text())}
    assert {"clock", "disk_full", "wrong_result", "world_size"} <= kinds
    assert kinds <= set(ADVICE)
