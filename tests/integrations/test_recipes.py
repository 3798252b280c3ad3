"""jobs/recipes: each spec is valid and is on its page; its run is stopped and resumed with the arguments in the file.

The frameworks themselves are too large for this, or need GPUs. tests/integrations/programs/recipes has a stand-in for
each, which accepts its framework's arguments and no others, ends on SIGTERM as the framework does, and has the same
checkpoints. JAX, DeepSpeed and mpi4py are the packages themselves, where they are installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hpcaccel.cli.main import program
from hpcaccel.spec import load_spec
from tests.cluster.dev_cluster import wait_until
from tests.cluster.scenario import Scenario

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
FILES = {path.stem: path for path in sorted((ROOT / "jobs" / "recipes").glob("*.yaml"))}
PROGRAMS = Path(__file__).parent / "programs" / "recipes"


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a recipe's run is made small, when it is stopped, and what its second attempt must get."""

    program: str
    sizes: dict[str, int]
    """Values for some of the recipe's arguments, and for arguments that limit the number of steps."""
    last: int
    """The step at which the training ends."""
    lost: int = 0
    """How many steps the stop may cost."""
    until: str = "step 4"
    """The run is stopped after rank 0 of the first attempt has printed this line."""
    resume_args: list[str] = field(default_factory=list)
    """What the second attempt gets, sorted by name as in all specs of ``Scenario``. RUN, NEWEST and STEP stand for the
    run's directory and its newest checkpoint."""
    ranks: int = 2
    needs: str | None = None
    """A package without which the case is skipped."""


CASES = {  # the first word is the recipe
    "megatron": Case(
        program="train_megatron.py",
        sizes={"train-iters": 300, "save-interval": 200},
        last=300,
        resume_args=["--ckpt-step", "STEP", "--load", "RUN/ckpt"],
    ),
    "automodel": Case(program="train_automodel.py", sizes={"step_scheduler.ckpt_every_steps": 200}, last=300),
    "verl": Case(
        program="train_verl.py",
        sizes={"trainer.save_freq": 200, "trainer.total_training_steps": 300},
        last=300,
        resume_args=["trainer.resume_from_path=NEWEST", "trainer.resume_mode=resume_path"],
        ranks=1,
    ),
    "open_clip": Case(program="train_open_clip.py", sizes={"epochs": 300}, last=300),
    "timm": Case(
        program="train_timm.py",
        sizes={"epochs": 300},
        last=300,
        lost=1,  # if it is stopped between the removal of last.pth.tar and its replacement
        resume_args=["--resume", "NEWEST"],
    ),
    "diffusers": Case(
        program="train_diffusers.py",
        sizes={"max_train_steps": 60, "checkpointing_steps": 5},
        last=60,
        lost=4,
        until="saving 15",
        resume_args=["--resume_from_checkpoint", "NEWEST"],
    ),
    "deepspeed": Case(
        program="train_deepspeed.py",
        sizes={"save_steps": 3, "max_steps": 300},
        last=300,
        lost=2,
        resume_args=["--load_tag", "global_stepSTEP"],
    ),
    "deepspeed itself": Case(
        program="train_deepspeed_itself.py",
        sizes={"save_steps": 3, "max_steps": 100},
        last=100,
        lost=2,
        resume_args=["--load_tag", "global_stepSTEP"],
        needs="deepspeed",
    ),
    "jax": Case(
        program="train_jax.py",
        sizes={"save_steps": 200, "steps": 300},
        last=300,
        resume_args=["--resume", "NEWEST"],
        needs="jax",
    ),
    "mpi": Case(
        program="train_mpi.py",
        sizes={"steps": 300, "save-every": 200},
        last=300,
        resume_args=["--restart", "NEWEST"],
    ),
    "mpi itself": Case(
        program="train_mpi_itself.py",
        sizes={"steps": 300, "save-every": 200},
        last=300,
        resume_args=["--restart", "NEWEST"],
        ranks=1,  # on this machine there is no srun, through which MPI's ranks would find each other
        needs="mpi4py",
    ),
}


# -- the specs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_recipe_is_valid(name: str) -> None:
    spec = load_spec(FILES[name])
    assert spec.stop_mode == "signals"
    assert spec.launch_watch("/work") is not None
    answer = CliRunner().invoke(program(), ["validate", str(FILES[name]), "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["valid"] is True


def test_page_shows_each_recipe_as_it_is_in_its_file() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    texts = [path.read_text().partition("\n")[2] for path in FILES.values()]  # without the line for editors
    assert sorted(blocks) == sorted(texts)
    rows = re.findall(r"^\| \[.*?\]\(\.\./jobs/recipes/(\w+)\.yaml\)", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(FILES)


def test_each_recipe_is_run() -> None:
    assert {name.split()[0] for name in CASES} == set(FILES)


# -- stop and resume --------------------------------------------------------------------------------------------------


@pytest.mark.chaos
@pytest.mark.parametrize("name", CASES)
def test_run_is_stopped_and_resumed_with_the_arguments_of_the_recipe(tmp_path: Path, name: str) -> None:
    case, recipe = CASES[name], name.split()[0]
    if case.needs is not None:
        pytest.importorskip(case.needs)
    scenario = Scenario(None, tmp_path)
    scenario.submit(small(recipe, case, tmp_path))
    log = scenario.dir.rank_log(1, 0)
    wait_until(lambda: log.exists() and bool(numbers(scenario, "step", 1) or scenario.lines("end")), "the first step")
    assert scenario.lines("end") == [], scenario.story
    scenario.wait_for_word(case.until)
    scenario.cli("stop", "--requeue", scenario.dir.run_id)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("stop", "requeue"), ("completed", "end")], scenario.story

    first, second = scenario.lines("start")
    assert (first["checkpoint"], first["resume_args"]) == (None, [])
    newest, step = str(second["checkpoint"]), str(second["checkpoint_step"])
    places = {"RUN": str(scenario.dir.path), "NEWEST": newest, "STEP": step}
    expected = [re.sub("|".join(places), lambda found: places[found[0]], word) for word in case.resume_args]
    assert second["resume_args"] == expected
    before, after = (said_json(scenario, "argv", attempt) for attempt in (1, 2))
    assert after == [*before, *expected]

    assert numbers(scenario, "began at", 1) == [0]
    [began] = numbers(scenario, "began at", 2)
    done = numbers(scenario, "step", 1)[-1]
    left = numbers(scenario, "left at", 1)
    assert left in ([], [began]), "a program that saves when it is stopped continues there"
    assert bool(left) == (case.program in SAVING)
    assert began > 0, newest
    assert -1 <= done - began <= case.lost  # it may be stopped after a save, before it has printed the step
    assert numbers(scenario, "finished at", 2) == [case.last]
    check = CHECKS.get(recipe)
    if check is not None:
        check(scenario)


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
SAVING = ("train_megatron.py", "train_automodel.py", "train_jax.py", "train_mpi.py", "train_mpi_itself.py")
"""Programs that save when they get SIGTERM."""


def small(recipe: str, case: Case, folder: Path) -> dict[str, Any]:
    """The recipe as a small run of the case's program on this machine. All other arguments are those of its file."""
    spec = yaml.safe_load(FILES[recipe].read_text())
    entrypoint, program = spec["entrypoint"], str(PROGRAMS / case.program)
    entrypoint["args"] |= case.sizes
    if entrypoint.pop("module", None) is not None:
        entrypoint["script"] = program
    elif recipe == "verl":
        shell, option, text, word = entrypoint["command"]
        real = "python3 -m verl.trainer.main_ppo"
        assert text.count(real) == 1
        entrypoint["command"] = [shell, option, text.replace(real, f"{sys.executable} {program}"), word]
        spec["slurm"]["time"] = 1  # less than a minute and esi_redundant_time: each step is near the end
    else:
        entrypoint["command"][:1] = [sys.executable, program]
    (folder / "finetune.yaml").write_text(
        f"recipe: Finetune\nstep_scheduler: {{max_steps: {case.last}}}\n"
    )  # AutoModel
    (folder / "zero3.json").write_text(json.dumps(DEEPSPEED))
    time = spec["slurm"]["time"]
    spec["slurm"] = {"nodes": 1, "gpus_per_node": 0, "ntasks_per_node": case.ranks, "mem": None, "time": time}
    return spec


def said(scenario: Scenario, word: str, attempt: int) -> list[str]:
    """What rank 0 has printed behind ``word``, line by line."""
    lines = scenario.dir.rank_log(attempt, 0).read_text().splitlines()
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


def said_json(scenario: Scenario, word: str, attempt: int) -> Any:
    [text] = said(scenario, word, attempt)
    return json.loads(text)


def numbers(scenario: Scenario, word: str, attempt: int) -> list[int]:
    return [int(text) for text in said(scenario, word, attempt)]


# -- what only some of them do ----------------------------------------------------------------------------------------


def verl_knows_the_end_of_the_job(scenario: Scenario) -> None:
    for line in scenario.lines("start"):
        [expires] = said(scenario, "expires", line["attempt"])
        assert abs(float(expires) - (line["time"] + 60)) < 10
    assert said(scenario, "Force saving checkpoint:", 1), "save_freq alone would not have saved"


def torn_checkpoint_was_passed_over(scenario: Scenario) -> None:
    assert scenario.lines("start")[1]["checkpoint"] == f"{scenario.dir.path}/out/checkpoint-10"


def losses_are_those_of_an_undisturbed_run(scenario: Scenario) -> None:
    import numpy

    weights = numpy.zeros(4, dtype=numpy.float32)
    for step in range(CASES["jax"].last):
        gradients = []
        for rank in range(CASES["jax"].ranks):
            x = numpy.random.default_rng([step, rank]).standard_normal((8, 4), dtype=numpy.float32)
            gradients.append(x.T @ (x @ weights - x.sum(axis=1)) / 4)
        weights = weights - 0.001 * sum(gradients) / len(gradients)
    assert said_json(scenario, "weights", 2) == pytest.approx(weights.tolist(), rel=1e-4)


CHECKS = {
    "verl": verl_knows_the_end_of_the_job,
    "diffusers": torn_checkpoint_was_passed_over,
    "jax": losses_are_those_of_an_undisturbed_run,
}


# -- the stand-ins ----------------------------------------------------------------------------------------------------

STAND_INS = sorted({case.program for case in CASES.values() if case.needs is None})
WRONG = {"train_verl.py": ["trainer.wrong=1"], "train_automodel.py": ["finetune.yaml", "--checkpoint.wrong=1"]}


@pytest.mark.parametrize("program", STAND_INS)
def test_stand_in_refuses_an_argument_that_its_framework_does_not_have(tmp_path: Path, program: str) -> None:
    (tmp_path / "finetune.yaml").write_text("recipe: Finetune\n")
    words = [sys.executable, str(PROGRAMS / program), *WRONG.get(program, ["--wrong", "1"])]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "1"}
    answer = subprocess.run(words, cwd=tmp_path, env=ranks, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode not in (0, -9)
    assert "wrong" in answer.stderr.splitlines()[-1]
