"""Each block of code on a page is run or compared by a test, or a comment above it says why it is not run.

Such a comment begins with ``not run:``. What can be checked without running it is checked here: files in YAML and JSON
are loaded, and commands and options of hpcaccel exist, also those in the text.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from hpcaccel.cli.main import program
from hpcaccel.spec import ClusterProfile, spec_from_values
from tests.test_readme import ROOT

PAGES = [
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
    "README.md", "CONTRIBUTING.md", "SECURITY.md", "docker/README.md", "benchmarks/README.md", "jobs/README.md",
    "hpcaccel/SKILL.md",
]  # fmt: skip
BY_A_TEST: dict[str, dict[str, Any]] = {
    "README.md": {"tests/test_readme.py": ("console", "diff", "yaml")},
    "hpcaccel/SKILL.md": {"tests/test_skill.py": ("console", "yaml")},
    "docs/inference.md": {"tests/integrations/test_inference.py": ("python", "yaml")},
    "docs/context-parallel.md": {"tests/runtime/test_context_parallel.py": ("python",)},
    "docs/accelerators.md": {"tests/runtime/test_device_backend.py": ("python",)},
    "docs/big-models.md": {"tests/runtime/test_offload.py": ("python",)},
    "docs/checkpoints.md": {"tests/test_checkpoints_page.py": ("console", "python", "yaml")},
    "docs/deepspeed.md": {"tests/integrations/test_deepspeed_engine.py": ("python",)},
    "docs/functions.md": {"tests/test_readme.py": ("python",)},
    "docs/grpo.md": {"tests/integrations/test_grpo.py": ("python", "yaml")},
    "docs/laptop.md": {"tests/test_places.py": ("console",)},
    "docs/notebooks.md": {"tests/submission/test_notebook.py": ("python",)},
    "docs/places.md": {"tests/test_places.py": ("console",)},
    "docs/recipes.md": {"tests/integrations/test_recipes.py": ("yaml",)},
    "docs/runs.md": {"tests/test_readme.py": ("console",)},
    "docs/slurm.md": {"tests/test_places.py": ("console",), "tests/test_readme.py": ("yaml",)},
    "docs/spec-file.md": {"tests/test_readme.py": ("console", "yaml")},
    "docs/sweeps.md": {"tests/spec/test_sweeps_page.py": ("yaml",)},
    "docs/torchrun.md": {"tests/test_places.py": ("console",)},
    "docs/trainers.md": {"tests/integrations/test_trainers_page.py": ("yaml",)},
    "docs/training.md": {"tests/runtime/test_training_page.py": ("python",)},
    "docs/tutorials/first-cluster-job.md": {"tests/cluster/test_first_cluster_job.py": ("console", "yaml")},
    "docs/versions.md": {"tests/test_versions_page.py": ("yaml",)},
    **{
        f"docs/tutorials/{name}.md": {"tests/test_tutorials.py": ("console", "diff", "python", "yaml")}
        for name in ("first-run", "first-sweep", "from-accelerate", "from-sbatch", "from-submitit")
    },
    **{
        path.relative_to(ROOT).as_posix(): {"tests/test_recipes_from_practice.py": ("console", "yaml")}
        for path in (ROOT / "docs" / "how-to").glob("*.md")
    },
}
"""By page, the tests that run its blocks or compare them with files that are run, and in which languages."""


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str
    reason: str
    """Why it is not run, if the page says so."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    opening = r"(?:^<!-- not run: ([^>]+?) -->\n\n)?"
    for found in re.finditer(rf"{opening}^( *)(`{{3,}})(\S*)\n(.*?)^\2\3 *$", text, re.M | re.S):
        if not found[4].startswith("{"):  # a directive of the site
            line = text.count("\n", 0, found.start(3)) + 1
            yield Block(page, line, found[4], found[5], " ".join((found[1] or "").split()))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def loaded(block: Block) -> bool:
    """Whether `test_file_of_a_page_is_valid` loads this block."""
    return block.language in ("yaml", "json") and not block.reason


def test_each_block_is_under_test_or_has_a_reason() -> None:
    assert len(BLOCKS) > 150
    without = [
        block.place
        for block in BLOCKS
        if not block.reason
        and not loaded(block)
        and not any(block.language in languages for languages in BY_A_TEST.get(block.page, {}).values())
    ]
    assert not without, "write `<!-- not run: WHY -->` and an empty line above, or add the test to BY_A_TEST"


@pytest.mark.parametrize("page", BY_A_TEST)
def test_named_test_reads_the_page(page: str) -> None:
    for file in BY_A_TEST[page]:
        source = (ROOT / file).read_text()
        assert Path(page).name in source or Path(page).stem in source or Path(page).parent.name in source


def test_reasons_are_sentences_and_the_tests_that_they_name_exist() -> None:
    reasons = {block.place: block.reason for block in BLOCKS if block.reason}
    assert [place for place, reason in reasons.items() if len(reason.split()) < 3] == []
    named = {path for reason in reasons.values() for path in re.findall(r"tests/[\w/.]+\w", reason)}
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert len(named) > 10


@pytest.mark.parametrize("block", [one for one in BLOCKS if loaded(one)], ids=lambda block: block.place)
def test_file_of_a_page_is_valid(block: Block) -> None:
    if block.language == "json":
        assert json.loads(block.text)
        return
    values = yaml.safe_load(block.text) or {}
    if "runs_dir" in values:
        ClusterProfile.model_validate({"name": "alps", **values})
    elif "compute_environment" in values:  # Accelerate's file
        return
    elif not {"jobs", "sweep", "extends"} & values.keys():  # those have tests of their own
        spec_from_values({"name": "gpt", "entrypoint": {"command": ["true"]}, **values})


# -- commands ----------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each command line of hpcaccel in a block or in the text, as words, with its place."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        inline = re.findall(r"(?<!`)`(hpcaccel [^`\n]+)`", text)
        shown = [line for block in blocks_of(page) for line in block.text.splitlines()]
        typed = [re.sub(r"^(?:\$|#|\w+\$) ", "", line) for line in shown]
        for line in [*inline, *(line for line in typed if re.match(r"(?:salloc .*)?hpcaccel [a-z]", line))]:
            for command in re.findall(r"hpcaccel [a-z].*?(?= {3,}|\||;| && |  hpcaccel|$)", line.partition("  #")[0]):
                yield f"{page}: {command}", words_of(command)


def words_of(command: str) -> list[str]:
    try:
        return shlex.split(command.removesuffix("\\"), comments=True)[1:]
    except ValueError:  # an ellipsis in quotes
        return command.split()[1:]


def unknown_in(words: list[str], root: Any) -> str | None:
    """The first word that is no command or no option."""
    command, context = root, typer.Context(root, info_name="hpcaccel")
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if re.search(r"[^a-z-]", words[0]):
            return None  # a placeholder, such as COMMAND
        if words[0] not in command.commands:
            return words[0]
        command = command.commands[words.pop(0)]
        context = typer.Context(command, info_name="x", parent=context)
    if command.name == "launch":  # reads Accelerate's and torchrun's options, and the script's behind its name
        return None
    known = {spelling for one in command.get_params(context) for spelling in (*one.opts, *one.secondary_opts)}
    given = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
    return next((option for option in given if option not in {*known, "--help", "--version"}), None)


def test_commands_and_options_on_the_pages_exist() -> None:
    root = typer.main.get_command(program())
    found = list(commands())
    assert len(found) > 300
    assert [place for place, words in found if unknown_in(words, root)] == []
