"""docs/versions.md: its spec is valid, and its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from hpcaccel.checkpoint.rank_blocks import BLOCK
from hpcaccel.checkpoint_files import manifest
from hpcaccel.core import launch_spec, rank_protocol, records
from hpcaccel.spec import load_spec
from hpcaccel.spec.cluster.cluster_facts import FACTS_VERSION
from hpcaccel.spec.loading.spec_version import RENAMED, SPEC_VERSION
from hpcaccel.submission.remote import protocol

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "versions.md").read_text()


def row(first: str) -> str:
    """The second cell of the row whose first cell begins with ``first``."""
    return re.search(rf"^\| {re.escape(first)}[^|]*\| ([^|]+?) \|", PAGE, re.M)[1]


def test_spec_of_the_page_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(text)
    assert load_spec(tmp_path / "job.yaml").name == "gpt"
    assert yaml.safe_load(text)["spec_version"] == SPEC_VERSION


def test_versions_of_the_page_are_those_of_the_code() -> None:
    assert row("`record.json`") == str(records.RunRecord.version)
    assert row("`spec.json`") == str(launch_spec.SPEC_JSON_VERSION)
    assert row("ledger") == str(records.AttemptStart.version) == str(records.AttemptEnd.version)
    versions = f"{manifest.VERSION}; {manifest.PARTS_VERSION} if more than {BLOCK} ranks have saved"
    assert row("a checkpoint's manifest") == versions
    assert row("facts of a cluster") == str(FACTS_VERSION)
    assert row("batch step and ranks") == str(rank_protocol.PROTOCOL)
    assert row("this machine and a login node") == str(protocol.PROTOCOL)


def test_page_says_whether_a_key_has_been_renamed() -> None:
    assert ("No key has been renamed so far" in PAGE) == (not RENAMED)


def test_releases_of_slurm_whose_output_is_recorded_are_named() -> None:
    for folder in (ROOT / "tests" / "data" / "slurm").iterdir():
        if folder.is_dir():
            assert folder.name in PAGE
