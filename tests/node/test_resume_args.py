"""``entrypoint.resume_args``: an attempt gets the newest complete checkpoint in the program's own flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.scenario import Scenario

PROGRAM = """
import json, pathlib, sys, time
print("argv", json.dumps(sys.argv[1:]), flush=True)
out = pathlib.Path(sys.argv[2])
if not (out / "{first}").exists():
    for name, files in {made}.items():
        (out / name).mkdir(parents=True)
        for file in files:
            (out / name / file).write_text("x")
    for name, text in {beside}.items():
        (out / name).write_text(text)
    sys.exit("the first attempt fails")
"""

FRAMEWORKS: dict[str, tuple[dict[str, Any], Any, dict[str, list[str]], dict[str, str], list[str]]] = {
    # entrypoint, watch, checkpoints by name with their files, files beside them, expected arguments
    "transformers": (
        {"args": {"output_dir": "{run_dir}/out"}, "resume_args": {"resume_from_checkpoint": "{newest}"}},
        "transformers",
        {"checkpoint-9": ["trainer_state.json"], "checkpoint-20": ["optimizer.pt"]},
        {},
        ["--resume_from_checkpoint", "OUT/checkpoint-9"],
    ),
    "lightning": (
        {"args": ["--dir", "{run_dir}/out"], "resume_args": ["--ckpt_path={newest}"]},
        {"preset": "lightning", "directory": "{run_dir}/out"},
        {"epoch=0-step=9.ckpt": ["meta.pt"], "epoch=0-step=20.ckpt": [".metadata"]},
        {},
        ["--ckpt_path=OUT/epoch=0-step=9.ckpt"],
    ),
    "torchtitan": (
        {
            "args": ["--job.dump_folder", "{run_dir}/out"],
            "resume_args": ["--checkpoint.initial_load_path", "{newest}", "--checkpoint.load_step", "{step}"],
        },
        "torchtitan",
        {"checkpoint/step-9": [".metadata"], "checkpoint/step-20": ["__0_0.distcp"]},
        {},
        ["--checkpoint.initial_load_path", "OUT/checkpoint/step-9", "--checkpoint.load_step", "9"],
    ),
    "megatron": (
        {"args": {"save": "{run_dir}/out"}, "resume_args": ["--load", "{run_dir}/out", "--ckpt-step", "{step}"]},
        "megatron",
        {"iter_0000009": ["a.distcp"], "iter_0000020": ["a.distcp"]},
        {"latest_checkpointed_iteration.txt": "9"},
        ["--load", "OUT", "--ckpt-step", "9"],
    ),
    "hydra": (
        {"args": ["hydra.run.dir", "{run_dir}/out"], "resume_args": ["trainer.resume={newest}"]},
        {"glob": "{run_dir}/out/global_step_*", "complete": "done"},
        {"global_step_9": ["done"], "global_step_20": ["x"]},
        {},
        ["trainer.resume=OUT/global_step_9"],
    ),
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_second_attempt_gets_the_newest_complete_checkpoint(tmp_path: Path, name: str) -> None:
    entrypoint, watch, made, beside, expected = FRAMEWORKS[name]
    program = PROGRAM.replace("{first}", next(iter(made)))
    program = program.replace("{made}", repr(made)).replace("{beside}", repr(beside))
    (tmp_path / "program.py").write_text(program)
    scenario = Scenario(None, tmp_path)
    scenario.submit(
        {
            "entrypoint": {"script": "program.py", **entrypoint},
            "checkpoint": {"watch": watch},
            "slurm": {"nodes": 1, "gpus_per_node": 0, "ntasks_per_node": 1, "mem": None},
        }
    )
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart"), ("completed", "end")], scenario.story
    out = f"{scenario.dir.path}/out"
    expected = [word.replace("OUT", out) for word in expected]
    plain, resumed = (json.loads(scenario.wait_for_word("argv", attempt=number)[len("argv ") :]) for number in (1, 2))
    assert plain[1] == out
    assert resumed == [*plain, *expected]
    first, second = scenario.lines("start")
    assert (first["checkpoint"], first["resume_args"]) == (None, [])
    assert (second["checkpoint_step"], second["checkpoint"]) == (9, f"{out}/{next(iter(made))}")
    assert second["resume_args"] == expected
    listed = json.loads(scenario.cli("checkpoint", "list", scenario.dir.run_id, "--json").stdout)
    assert sorted((one["step"], one["good"]) for one in listed) == [(9, True), (20, False)]
    status = scenario.status()
    assert (status["checkpoint_step"], status["checkpoint"]) == (9, f"{out}/{next(iter(made))}")
