"""Tests of the parsers of site data: partitions, nodes, generic resources, limits and tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.slurm import site_parsing

RECORDED = Path(__file__).parents[1] / "data" / "slurm"


@pytest.mark.parametrize(("version", "names"), [("22.05", ["gpu", "urgent"]), ("24.05", ["l40", "gpu-bio"])])
def test_partition_records_may_span_several_lines(version: str, names: list[str]) -> None:
    found = site_parsing.records((RECORDED / version / "scontrol-show-partition.txt").read_text(), "PartitionName")
    assert [one["PartitionName"] for one in found] == names
    assert all(one["State"] == "UP" and one["TRES"].startswith("cpu=") for one in found)


def test_reason_text_does_not_override_node_fields() -> None:
    line = "NodeName=n1 Gres=gpu:2 OS=Linux 6.1 #1 SMP  State=DOWN+DRAIN Reason=bad State=IDLE Gres=gpu:9 [root@now]"
    (found,) = site_parsing.records(line, "NodeName")
    assert (found["State"], found["Gres"], found["OS"]) == ("DOWN+DRAIN", "gpu:2", "Linux 6.1 #1 SMP")


@pytest.mark.parametrize(
    ("text", "gpus", "others"),
    [
        ("gpu:2", {"gpu": 2}, []),
        ("gpu:a100:4(S:0-1),gpu:v100:2(IDX:0,1),nvme:1", {"a100": 4, "v100": 2}, ["nvme:1"]),
        ("gpu", {"gpu": 1}, []),
        ("gpu:a100", {"a100": 1}, []),
        ("craynetwork:4,shard:a100:1K", {}, ["craynetwork:4", "shard:a100:1K"]),
        ("(null)", {}, []),
        ("", {}, []),
    ],
)
def test_gres_is_split_into_gpus_and_other_resources(text: str, gpus: dict[str, int], others: list[str]) -> None:
    assert site_parsing.gres(text) == (gpus, others)


def test_durations_counts_and_tres_are_parsed() -> None:
    assert [site_parsing.minutes(text) for text in ("1-00:00:00", "30", "0 min", "UNLIMITED", "NONE", None)] == [
        1440, 30, 0, None, None, None,
    ]  # fmt: skip
    assert [site_parsing.seconds(text) for text in ("30 sec", "00:02:00", "NONE", "")] == [30, 120, None, None]
    assert [site_parsing.count(text) for text in ("1001", "750G", "20000M", "UNLIMITED", "N/A")] == [
        1001, 768000, 20000, None, None,
    ]  # fmt: skip
    assert site_parsing.tres("cpu=4,gres/gpu:a100=8") == {"cpu": "4", "gres/gpu:a100": "8"}


def test_table_rows_are_keyed_by_headings() -> None:
    rows = site_parsing.table((RECORDED / "26.11" / "sacctmgr-assoc.txt").read_text())
    assert [(row["Account"], row["User"], row["QOS"]) for row in rows] == [
        ("root", "", "normal"),
        ("root", "root", "normal"),
    ]
    assert site_parsing.table("a warning\n") == []
