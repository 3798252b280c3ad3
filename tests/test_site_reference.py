"""The generated reference of the site: it has every field, command, variable, public name and failure cause."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import hpcaccel
from hpcaccel.cli.command_table import COMMANDS, GROUPS
from hpcaccel.node.failures import CAUSES
from hpcaccel.spec import ClusterProfile
from hpcaccel_site import PARTS, api_reference, command_reference, environment_reference, run_reference, spec_reference
from hpcaccel_site.markdown import code, plain
from tests.test_readme import ROOT, run

DOCS = ROOT / "docs"


def keys(page: str) -> set[str]:
    """The keys in the first column of all tables."""
    return set(re.findall(r"^\| \[?`([\w.-]+)`", page, re.MULTILINE))


def keys_of_schema(file: str, names: Mapping[str, Any] | None = None) -> Iterator[tuple[str, set[str]]]:
    """Each section of a committed schema with its keys."""
    schema = json.loads((DOCS / file).read_text())
    yield "top", set(schema["properties"])
    for name, section in schema["$defs"].items():
        if name not in (names or {}):
            yield name, set(section["properties"])


def test_table_of_the_spec_has_every_key_of_the_schema() -> None:
    page = spec_reference.job_fields()
    for section, wanted in keys_of_schema("job.schema.json"):
        assert wanted <= keys(page), section


def test_table_of_sweeps_has_every_key_of_the_schema() -> None:
    jobs = dict(keys_of_schema("job.schema.json"))
    page = spec_reference.sweep_fields()
    for section, wanted in keys_of_schema("sweep.schema.json", jobs):
        if section != "top":
            assert wanted <= keys(page), section


def test_table_of_profiles_has_every_field() -> None:
    assert set(ClusterProfile.model_fields) <= keys(spec_reference.profile_fields())


@pytest.mark.parametrize(
    "row",
    [
        "| [`nodes`]{#spec-slurm-nodes} | text | `1` | Number of nodes: 4, a range such as 2-4, or a list of sizes. "
        "Example: `1`. |",
        "| `entrypoint` | [section](#spec-entrypoint) | required | The program that the ranks run. |",
        "| [`name`]{#spec-name} | text | required | A short name, used for the Slurm job and for the directory of its "
        "runs. Example: `gpt`. |",
    ],
)
def test_row_of_a_field(row: str) -> None:
    assert row in spec_reference.job_fields().splitlines()


def test_anchors_of_fields_are_unique() -> None:
    page = spec_reference.job_fields()
    anchors = re.findall(r"\{#([\w-]+)\}", page) + re.findall(r"^\(([\w-]+)\)=", page, re.MULTILINE)
    assert len(anchors) > 150
    assert len(anchors) == len(set(anchors))


def test_page_of_commands_has_every_command_with_its_options() -> None:
    page = command_reference.commands_page()
    headings = set(re.findall(r"^#+ (hpcaccel .*)$", page, re.MULTILINE))
    public = {f"hpcaccel {name}" for name, entry in COMMANDS.items() if not entry.hidden}
    assert public | {f"hpcaccel {name}" for name in GROUPS} <= headings
    assert "hpcaccel sweep start" in headings
    assert "| `--requeue` | Save, exit, and requeue the job. |" in page
    assert "hpcaccel answer" not in headings


def test_table_of_variables_is_that_of_the_code() -> None:
    in_table = [one.name for one in environment_reference.VARIABLES]
    assert len(in_table) == len(set(in_table))
    in_code = environment_reference.variables_in_code()
    missing = {name: str(path) for name, path in in_code.items() if name not in in_table}
    assert not missing, f"add these to docs/extensions/hpcaccel_site/environment_reference.py: {missing}"
    assert not set(in_table) - set(in_code), "these are in no file of the code any more"


def test_page_of_the_api_has_every_public_name() -> None:
    names = api_reference.grouped_names()
    assert len(names) == len(set(names))
    assert {*hpcaccel.__all__, "map"} == {name for name in names if "." not in name}


def members() -> Iterator[tuple[str, Any]]:
    """The public names, and the methods and properties of classes that hpcaccel defines."""
    for name in (*hpcaccel.__all__, "map"):
        value = getattr(hpcaccel, name)
        yield name, value
        for attribute in [one for one in dir(value) if inspect.isclass(value) and not one.startswith("_")]:
            found = inspect.getattr_static(value, attribute)
            function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            if inspect.isfunction(function) and function.__module__.startswith("hpcaccel."):
                yield f"{name}.{attribute}", function


def test_members_of_public_names_have_docstrings_and_types() -> None:
    found = dict(members())
    assert len(found) > 300
    assert [name for name, value in found.items() if not value.__doc__] == []
    functions = {name: value for name, value in found.items() if inspect.isfunction(value)}
    assert [name for name, value in functions.items() if "return" not in value.__annotations__] == []


ELSEWHERE = re.compile(r"see ``|as in ``|those of|Like ``")
"""The docstring of another function describes the parameters."""


def test_members_of_public_names_describe_their_parameters_and_errors() -> None:
    for name, function in members():
        if not inspect.isfunction(function):
            continue
        doc, owner = function.__doc__ or "", getattr(hpcaccel, name.partition(".")[0]).__doc__ or ""
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        taken = [one.name for one in inspect.signature(function).parameters.values() if one.kind not in kinds]
        described = [one for one in taken if one not in ("self", "cls") and not one.startswith("_")]
        if len(described) > 1 and not ELSEWHERE.search(doc):  # a single one is in the first sentence
            assert [one for one in described if not re.search(rf"\b{one}\b", doc + owner)] == [], name
        raises = re.search(r"^\s+raise [A-Z]\w+\(", inspect.getsource(inspect.unwrap(function)), re.MULTILINE)
        assert not raises or "Raises:" in doc, name


def examples() -> dict[str, str]:
    """The code below ``Example::`` in the docstrings of public names."""
    found = {}
    for name, value in members():
        _, header, rest = inspect.cleandoc(value.__doc__ or "").partition("Example::\n\n")
        if header:
            found[name] = inspect.cleandoc("\n" + rest)
    return found


def test_examples_of_docstrings_are_python() -> None:
    found = examples()
    assert {"submit", "map", "sweep", "find_run", "stop_gate", "ResultsFile", "log", "Accelerator"} <= set(found)
    for name, code_of_example in found.items():
        compile(code_of_example, name, "exec")


START = """\
import math, pathlib, torch, hpcaccel
from hpcaccel import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pathlib.Path("job.yaml").write_text("name: gpt\\nentrypoint: {command: ['true']}\\n")
pathlib.Path("metric.py").write_text("import hpcaccel; hpcaccel.log({'loss': 1.0}, step=1)")
pathlib.Path("sweep.yaml").write_text(
    "name: s\\nentrypoint: {script: metric.py}\\n"
    "sweep: {metric: loss, parameters: {args.lr: {choice: [1, 2]}}, max_trials: 1}\\n"
)
model, loss_function = nn.Linear(4, 2), nn.functional.cross_entropy
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
loader = DataLoader(dataset, batch_size=16)
prompts = ["a", "bc"]
start, train_step, save = 0, lambda: None, str
"""
"""Names that the examples use."""

BEFORE = {
    "Accelerator.accumulate": (
        "accelerator = Accelerator(gradient_accumulation_steps=2)\n"
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
    ),
    "Accelerator.join_uneven_inputs": (
        "accelerator = Accelerator()\nmodel, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
    ),
    "Accelerator.log": "accelerator = Accelerator()",
    "Accelerator.profile": "accelerator = Accelerator()",
    "Accelerator.set_trigger": "accelerator = Accelerator()",
    "Accelerator.gather_for_metrics": "accelerator = Accelerator()\nmodel, loader = accelerator.prepare(model, loader)",
    "find_run": "hpcaccel.submit('job.yaml', cluster='local').wait()",
}
NOT_RUN = {
    **dict.fromkeys(("Client", "Client.follow", "Client.metrics", "Client.submit"), "tests/service/test_client.py"),
    "notebook_launcher": "tests/runtime/test_notebook.py",
    "load_checkpoint_and_dispatch": "tests/runtime/test_offload_device_map.py",
}
"""Examples that need more than these names, with the test that runs such code."""


@pytest.mark.chaos
@pytest.mark.torch
@pytest.mark.parametrize("name", sorted({*examples()} - {*NOT_RUN}))
def test_example_of_a_docstring_runs(name: str, tmp_path: Path) -> None:
    text = "\n".join([START, BEFORE.get(name, ""), examples()[name]])
    (tmp_path / "example.py").write_text(f"{text}\n")
    answer = run([sys.executable, "example.py"], tmp_path)
    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize("name", NOT_RUN)
def test_example_that_is_run_elsewhere_exists(name: str) -> None:
    assert name in examples()
    assert (ROOT / NOT_RUN[name]).is_file()


def test_page_of_causes_has_every_cause_in_order() -> None:
    assert re.findall(r"^## (\w+)$", run_reference.failure_causes(), re.MULTILINE) == [one.name for one in CAUSES]


def test_exit_codes_are_those_of_the_design_page() -> None:
    (_, _, text) = (DOCS / "design.md").read_text().partition("## Exit codes\n\n")
    told = {int(code) for code in re.findall(r"(?:^|· )(\d+) ", text)}
    assert told <= {one for one, _, _ in run_reference.EXIT_CODES}


def test_files_of_a_run_directory_come_from_the_design_page() -> None:
    text = run_reference.run_directory()
    assert "| `attempts.jsonl` | supervisor |" in text
    assert "](../trainers.md#transformers)" in text
    assert "| `journal.jsonl`" in run_reference.sweep_directory()


def test_every_generated_part_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert set(re.findall(r"^<!-- generated: ([\w-]+)", pages, re.M)) - {"page", "pages"} == set(PARTS)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a `b|c` [x] <y>", r"a `b|c` \[x\] \<y\>"),
        ("two\n  lines", "two lines"),
        ("snake_case stays", "snake_case stays"),
        ("_under_ *star*", r"\_under\_ \*star\*"),
    ],
)
def test_plain_text_is_escaped_outside_of_code(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_code_with_backquotes_has_a_longer_fence() -> None:
    assert code("a `b`") == "`` a `b` ``"
