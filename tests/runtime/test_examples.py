"""Example scripts for Accelerate run with hpcaccel: only the package name in their imports is changed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.made_once import made_once

from .ranks import Ranks

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
SAYS = {
    "accumulate_and_clip": "6 steps, learning rate 0.0125",
    "batch_size": "agreed on one that fits: True",
    "evaluate": "101 of 103 right",
    "five_times": "5 times, alike: True",
    "logger": "__main__: training begins",
    "mixed_precision": "the loss fell: True",
    "prompts": "['PROMPT 0', 'PROMPT 1', 'PROMPT 2', 'PROMPT 3', 'PROMPT 4']",
    "resume": "same samples: True same weight: True",
    "save_on_main": "['by-hand.pt', 'model.pt']",
    "save_sharded": "{'0.weight': [6, 4], '0.bias': [6], '2.weight': [1, 6], '2.bias': [1]}",
    "trackers": "[{'lr': 0.1}, (0, {'loss': 1.0}), (1, {'loss': 0.5})]",
    "warm_up": "[0.5, 1.0, 0.75, 0.5, 0.25, 0.0]",
}


@dataclass(frozen=True)
class Run:
    out: Path
    size: int
    said: str

    def texts(self, name: str) -> list[str]:
        paths = [self.out / f"{name}.{rank}" for rank in range(self.size)]
        return [path.read_text() if path.exists() else self.said for path in paths]

    def codes(self, name: str) -> list[str]:
        paths = [self.out / f"{name}.{rank}.code" for rank in range(self.size)]
        return [path.read_text() if path.exists() else "none" for path in paths]


def renamed(source: str) -> str:
    return re.sub(r"^(from|import) accelerate\b", r"\1 hpcaccel", source, flags=re.MULTILINE)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    size = request.param

    def run_all(out: Path) -> str:
        scripts = [out / f"{name}.py" for name in NAMES]
        for script in scripts:
            script.write_text(renamed((EXAMPLES / script.name).read_text()))
        return "\n".join(Ranks("examples.py", str(out), *map(str, scripts), size=size).wait().outputs)

    out, said = made_once(tmp_path_factory, f"examples-{size}", run_all)
    return Run(out, size, said)


@pytest.mark.parametrize("name", NAMES)
def test_example_script_prints_the_expected_line(run: Run, name: str) -> None:
    texts = run.texts(name)
    assert run.codes(name) == ["0"] * run.size, "\n".join(texts)
    assert SAYS[name] in texts[0].splitlines(), "\n".join(texts)
    if name == "logger":
        together = "\n".join(texts)
        assert together.count("training begins") == 1
        assert together.count("each speaks") == run.size
    else:
        assert all(SAYS[name] not in text for text in texts[1:])


def test_example_scripts_do_not_mention_hpcaccel() -> None:
    for name in NAMES:
        source = (EXAMPLES / f"{name}.py").read_text()
        assert "hpcaccel" not in source
        assert len(renamed(source).splitlines()) == len(source.splitlines())
