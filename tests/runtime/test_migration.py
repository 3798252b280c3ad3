"""docs/migration.md lists every public name of Accelerate 1.15, and its verdict on each is true."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "tests/data/accelerate-1.15-names.json").read_text())
GUIDES: set[str] = set(json.loads((ROOT / "tests/data/accelerate-1.15-guides.json").read_text())["names"])
MEMBERS: dict[str, dict[str, list[str] | None]] = RECORD["members"]
PAGE = (ROOT / "docs/migration.md").read_text()
VERDICTS = {"same", "better", "not here", "in name"}
OTHERS = "Accelerate's other modules"
IN_A_SENTENCE = ("test_utils",)
"""Modules whose names without a row are covered by one sentence of the page."""


def tables() -> dict[str, dict[str, str]]:
    """The verdict on each name, by section heading or by the class that a table's own heading names."""
    found: dict[str, dict[str, str]] = {}
    section = table = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            section = table = line[3:]
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            table = table if line.startswith("## ") else section
        elif named := re.fullmatch(r"name of `(\w+)`", cells[0]):
            table = named[1]
        elif len(cells) > 1 and cells[1] in VERDICTS:
            for name in re.findall(r"`([\w.]+)`", cells[0]):
                rows = found.setdefault(table, {})
                assert name not in rows, f"{name} stands twice under {table}"
                rows[name] = cells[1]
    return found


TABLES = tables()
CLASSES = {
    "Accelerator": "`Accelerator`: methods and properties",
    **{name: name for name in MEMBERS if name != "Accelerator"},
}
HOMES = {
    "Accelerator": "hpcaccel.accelerator",
    "AcceleratedOptimizer": "hpcaccel.optimizer",
    "AcceleratedScheduler": "hpcaccel.scheduler",
}


def verdicts(kind: str) -> list[tuple[str, str]]:
    return list(TABLES[kind].items())


def test_every_exported_name_is_on_the_page() -> None:
    assert set(TABLES["`accelerate`"]) == set(RECORD["accelerate"])
    assert set(TABLES["`accelerate.utils`"]) == set(RECORD["accelerate.utils"])
    recorded = {
        f"{key.partition('.')[2]}.{name}"
        for key, names in RECORD.items()
        if key.startswith("accelerate.") and key != "accelerate.utils"
        for name in names
    }
    rows = set(TABLES[OTHERS])
    assert {row for row in rows - recorded if row.rpartition(".")[2] not in GUIDES} == set()
    # A name that several modules export may be listed under only one of them.
    known = {row.rpartition(".")[2] for row in rows} | set(TABLES["`accelerate`"]) | set(TABLES["`accelerate.utils`"])
    missing = {name for name in recorded if name.rpartition(".")[2] not in known}
    assert {name for name in missing if name.partition(".")[0] not in IN_A_SENTENCE} == set()
    assert all(f"`{name.partition('.')[0]}`" in PAGE for name in missing)


@pytest.mark.parametrize("kind", list(MEMBERS))
def test_every_member_is_on_the_page(kind: str) -> None:
    recorded = set(MEMBERS[kind]) - {"__init__"}
    assert set(TABLES[CLASSES[kind]]) == recorded


def test_every_keyword_is_on_the_page() -> None:
    recorded = MEMBERS["Accelerator"]["__init__"]
    assert recorded is not None
    assert set(TABLES["`Accelerator(...)`: keywords"]) == set(recorded)


def paths() -> list[tuple[str, str, str]]:
    pages = {"`accelerate`": "hpcaccel", "`accelerate.utils`": "hpcaccel.utils"}
    found = [(page, name, verdict) for key, page in pages.items() for name, verdict in verdicts(key)]
    for path, verdict in verdicts(OTHERS):
        page, _, name = path.rpartition(".")
        found.append((f"hpcaccel.{page}", name, verdict))
    return found


@pytest.mark.parametrize(("page", "name", "verdict"), paths())
def test_name_is_importable_or_its_import_error_gives_the_reason(page: str, name: str, verdict: str) -> None:
    statement = f"from {page} import {name}"
    if verdict != "not here":
        scope: dict[str, Any] = {}
        exec(statement, scope)
        assert scope[name] is not None
        return
    with pytest.raises(ImportError) as raised:
        exec(statement, {})
    assert name in str(raised.value)
    assert len(str(raised.value)) > len(f"hpcaccel has no {name}. ") + 20
    assert "cannot import name" not in str(raised.value)


def home(kind: str) -> Any:
    return getattr(import_module(HOMES.get(kind, "hpcaccel.state")), kind)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, table in CLASSES.items() for name, verdict in verdicts(table) if verdict != "not here"],
)
def test_supported_member_takes_accelerates_parameters(made: dict[str, Any], kind: str, name: str) -> None:
    """At least those of Accelerate's method, in the same order."""
    recorded = MEMBERS[kind][name]
    if name == "pipeline_parallel_rank":
        with pytest.raises(NotImplementedError):
            getattr(made[kind], name)
        return
    if recorded is None:
        getattr(made[kind], name)
        return
    ours = inspect.signature(getattr(made[kind], name)).parameters
    takes_all = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in ours.values())
    positions = [list(ours).index(word) for word in recorded if word in ours]
    assert positions == sorted(positions)
    missing = [word for word in recorded if not word.startswith("*") and word not in ours]
    assert not missing or (takes_all and any(word.startswith("*") for word in recorded)), missing


def test_no_member_is_missing() -> None:
    rows = [(name, verdict) for table in CLASSES.values() for name, verdict in verdicts(table)]
    assert [name for name, verdict in rows if verdict == "not here"] == []


@pytest.fixture(scope="module")
def made() -> Any:
    """One object of each class, in a single process."""
    import torch

    from hpcaccel import Accelerator
    from hpcaccel.state import AcceleratorState, GradientState, PartialState

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(raw, lambda step: 1.0)
    _, optimizer, scheduler = accelerator.prepare(model, raw, schedule)
    optimizer.step()
    yield {
        "Accelerator": accelerator,
        "PartialState": PartialState(),
        "AcceleratorState": AcceleratorState(),
        "GradientState": GradientState(),
        "AcceleratedOptimizer": optimizer,
        "AcceleratedScheduler": scheduler,
    }
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)  # or later tests would use this state


def test_prepared_objects_are_instances_of_the_public_classes(made: dict[str, Any]) -> None:
    for kind in HOMES:
        assert isinstance(made[kind], home(kind))


def test_accelerator_accepts_every_keyword_of_accelerate() -> None:
    from hpcaccel import Accelerator
    from hpcaccel.runtime.configuration import ELSEWHERE

    recorded = MEMBERS["Accelerator"]["__init__"]
    assert recorded is not None
    ours = list(inspect.signature(Accelerator.__init__).parameters)
    assert [word for word in recorded if word not in ours and word not in ELSEWHERE] == []
    assert ours[1:7] == recorded[:6]


def test_reasons_cover_exactly_the_unsupported_names() -> None:
    from hpcaccel.runtime.compat.unsupported import REASONS

    said = {
        name.rpartition(".")[2] for table in TABLES.values() for name, verdict in table.items() if verdict == "not here"
    }
    assert set(REASONS) == said - {"megatron_lm_plugin"}  # a keyword


@pytest.mark.parametrize(
    ("page", "name"),
    [
        (module, name)
        for module in ("checkpointing", "inference", "test_utils")
        for name in RECORD[f"accelerate.{module}"]
    ]
    + [("commands.launch", "tpu_launcher"), ("commands.config", "default_config"), ("commands", "anything")],
)
def test_name_in_an_unsupported_module_raises_with_the_reason(page: str, name: str) -> None:
    module = import_module(f"hpcaccel.{page}")
    if name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None
        return
    with pytest.raises(ImportError, match=name) as raised:
        getattr(module, name)
    assert len(str(raised.value)) > len(f"hpcaccel has no {name}. ") + 20


def test_accelerator_module_exports_what_scripts_import_from_it() -> None:
    from hpcaccel.accelerator import DataLoaderConfiguration, GradientAccumulationPlugin, gather
    from hpcaccel.utils import gather as of_utils

    assert gather is of_utils
    assert GradientAccumulationPlugin(num_steps=2).num_steps == 2
    assert DataLoaderConfiguration().even_batches
    with pytest.raises(ImportError, match="Megatron-LM is not supported"):
        exec("from hpcaccel.accelerator import MegatronLMPlugin", {})


PAGES_WITHOUT_A_FILE = {
    "commands": "accelerate_cli config config.config_args config.default env estimate launch merge test to_fsdp2 tpu "
    "utils",
    "utils": "ao bnb deepspeed fsdp_utils launch megatron_lm offload torch_xla transformer_engine",
}


@pytest.mark.parametrize(
    "page", [f"hpcaccel.{part}.{name}" for part, names in PAGES_WITHOUT_A_FILE.items() for name in names.split()]
)
def test_modules_without_a_file_can_be_imported(page: str) -> None:
    package, _, name = page.rpartition(".")
    code = f"""
        import {page}
        from {package} import {name} as found
        assert found is {page} and found.__name__ == {page!r}
        try:
            from {page} import MegatronLMPlugin
        except ImportError as error:
            print(error)
    """
    ended = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("hpcaccel has no MegatronLMPlugin. ")
