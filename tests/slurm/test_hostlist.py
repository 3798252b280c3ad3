from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcaccel.slurm.hostlist import array_indices, compress, expand, ranks_text, tasks_per_node


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-2]", ["n1", "n2"]),
        (
            "n[001-003,7],rack[1-2]n[01-02]",
            ["n001", "n002", "n003", "n7", "rack1n01", "rack1n02", "rack2n01", "rack2n02"],
        ),
        ("login,gpu[09-11]-ib", ["login", "gpu09-ib", "gpu10-ib", "gpu11-ib"]),
        ("nid[099-101]", ["nid099", "nid100", "nid101"]),
    ],
)
def test_expand(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n[1-2", "n1-2]", "n[a-b]", "n[3-1]", "n[]"])
def test_expand_rejects_invalid_host_list(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        expand(text)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([], ""),
        (["n1"], "n1"),
        (["n3", "n1", "n2", "n7"], "n[1-3,7]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n001", "n002", "n100"], "n[001-002,100]"),
        (["login", "n1"], "login,n1"),
        (["n1-ib", "n2-ib"], "n[1-2]-ib"),
    ],
)
def test_compress(hosts: list[str], text: str) -> None:
    assert compress(hosts) == text


@given(st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,4}(-ib)?", fullmatch=True)))
def test_expand_of_compressed_hosts_returns_the_same_hosts(hosts: list[str]) -> None:
    assert sorted(expand(compress(hosts))) == sorted(set(hosts))


def test_tasks_per_node() -> None:
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    assert tasks_per_node("2") == [2]
    with pytest.raises(ValueError, match="tasks per node"):
        tasks_per_node("4(2)")


@pytest.mark.parametrize(
    ("text", "indices"),
    [("1-5%2", [1, 2, 3, 4, 5]), ("[0,2-6:2]", [0, 2, 4, 6]), ("7", [7])],
)
def test_array_indices(text: str, indices: list[int]) -> None:
    assert array_indices(text) == indices


def test_array_indices_rejects_list_truncated_by_slurm() -> None:
    with pytest.raises(ValueError, match="array indices"):
        array_indices("1-5,7,...")


def test_ranks_text_shows_sorted_ranges() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 0, 2, 3, 4]) == "ranks 0, 2-5"
