"""The cluster facts file: storing, loading and validation."""

from __future__ import annotations

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec.cluster.cluster_facts import (
    NodeType,
    Partition,
    SiteConfig,
    SiteFacts,
    facts_path,
    load_facts,
    store_facts,
)

FACTS = SiteFacts(
    name="alps",
    probed_at=1_795_000_000.5,
    slurm_version="22.05",
    user="0123",
    config=SiteConfig(max_array_size=1001, job_requeue=False, preempt_mode="OFF"),
    partitions=[Partition(name="gpu", default=True, allow_accounts=["no", "1e3"], node_types=["4xa100"])],
    node_types=[NodeType(name="4xa100", gpus={"a100": 4, "1": 2}, states={"idle": 3}), NodeType(name="cpu")],
    unknown=["quota: it's not told, # or so"],
)


def test_stored_facts_load_unchanged_from_a_private_file() -> None:
    path = store_facts(FACTS)
    assert load_facts("alps") == FACTS
    assert path == facts_path("alps")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    text = path.read_text()
    assert text.startswith("# Created on 2026-11-")
    assert "`hpcaccel cluster probe alps`" in text.splitlines()[0]
    assert load_facts("other") is None


def test_age_text_uses_the_largest_whole_unit() -> None:
    now = FACTS.probed_at
    ages = [FACTS.age_text(now + seconds) for seconds in (-5, 59, 60, 7200, 86400, 3 * 86400)]
    assert ages == ["less than a minute", "less than a minute", "1 minute", "2 hours", "1 day", "3 days"]


def test_node_types_of_a_partition_and_their_gpu_count() -> None:
    assert [kind.name for kind in FACTS.node_types_of(["gpu"])] == ["4xa100"]
    assert FACTS.node_types[0].gpu_count == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 2\nname: alps\n", "written by a newer hpcaccel"),
        ("version: 1\nname: alps\n", "probed_at is missing"),
        ("version: 1\nname: alps\nprobed_at: 1\nslurm_version: 23.02\nwhat: ever\n", "what is not a known key"),
        ("{", "facts.yaml"),
        ("", "the file is empty"),
        ("- a\n", "must contain a mapping"),
        ("\x00\x01", "facts.yaml"),
    ],
)
def test_invalid_facts_file_is_refused_with_a_hint_to_probe(text: str, message: str) -> None:
    path = facts_path("alps")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(SpecError, match=message) as caught:
        load_facts("alps")
    assert "hpcaccel cluster probe alps" in str(caught.value)


def test_directory_in_place_of_the_facts_file_is_refused() -> None:
    facts_path("alps").mkdir(parents=True)
    with pytest.raises(SpecError, match="is a directory"):
        load_facts("alps")


@pytest.mark.parametrize("name", ["../x", "", "a/b"])
def test_invalid_profile_name_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="is not a valid profile name"):
        facts_path(name)
