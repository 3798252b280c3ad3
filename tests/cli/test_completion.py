"""Shell completion: commands, options, runs, clusters, partitions, spec keys; and ``status --watch``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Shell

PROGRAM = [sys.executable, "-m", "hpcaccel"]
TYPERS = [sys.executable, "-c", "from hpcaccel.cli.main import main; main()"]
FACTS = """\
{version: 1, name: alps, probed_at: 1700000000, slurm_version: 23.11.4,
 partitions: [{name: gpu, default: true}, {name: gpu-long}, {name: debug}]}
"""


def asked(shell: Shell, program: list[str], **variables: str) -> str:
    done = subprocess.run(
        program, cwd=shell.folder, env={**shell.environment, **variables}, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.stdout


def offered(shell: Shell, line: str, program: list[str] = PROGRAM) -> list[str]:
    """Completions in bash for a command line with the cursor at its end."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return asked(shell, program, _HPCACCEL_COMPLETE="complete_bash", **words).split()


def profile(shell: Shell, name: str, text: str, facts: str = "") -> None:
    folder = Path(shell.environment["XDG_CONFIG_HOME"]) / "hpcaccel" / "clusters"
    (folder / f"{name}.facts").mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)
    if facts:
        (folder / f"{name}.facts" / "facts.yaml").write_text(facts)


@pytest.mark.parametrize("program", [PROGRAM, TYPERS], ids=["quick", "typer"])
def test_runs_are_completed_by_name_and_id(shell: Shell, program: list[str]) -> None:
    shell.write("train.py", "")
    for name in ("gpt", "gpt-best", "other"):
        shell.write("job.yaml", f"name: {name}\nentrypoint: {{script: train.py}}\nruntime: {{stop: signals}}\n")
        said = json.loads(shell("submit", "job.yaml", "--cluster", "local", "--json").stdout)
    assert offered(shell, "hpcaccel status g", program) == ["gpt-best", "gpt"]
    assert offered(shell, f"hpcaccel logs {said['run_id'][:4]}", program)[0] == said["run_id"]
    assert "other" in offered(shell, "hpcaccel status ", program)
    assert offered(shell, "hpcaccel sweep status g", program) == []
    steps = Path(said["path"]) / "checkpoints"
    for name in ("step_00000010", "step_00000200", "step_00000300.saving"):
        (steps / name).mkdir(parents=True)
    assert offered(shell, "hpcaccel checkpoint show other@") == ["other@10", "other@200"]
    assert offered(shell, "hpcaccel submit job.yaml --from other@2") == ["other@200"]


def test_commands_and_options_are_completed(shell: Shell) -> None:
    assert offered(shell, "hpcaccel sub") == ["submit"]
    assert {"submit", "sweep", "docs"} <= set(offered(shell, "hpcaccel "))
    assert "answer" not in offered(shell, "hpcaccel ")
    assert offered(shell, "hpcaccel sweep st") == ["start", "status", "stop"]
    assert offered(shell, "hpcaccel submit job.yaml --li") == ["--live"]
    assert offered(shell, "hpcaccel checkpoint convert a b --to s") == ["safetensors"]
    assert offered(shell, "hpcaccel submit --dry-run job.yaml --runs-dir x") == []
    assert offered(shell, "hpcaccel nonsense x") == []


def test_spec_keys_and_their_values_are_completed(shell: Shell) -> None:
    assert offered(shell, "hpcaccel submit job.yaml slurm.par") == ["slurm.partition="]
    assert offered(shell, "hpcaccel submit job.yaml --wait slurm.nodes=2 runtime.strat") == ["runtime.strategy="]
    assert offered(shell, "hpcaccel render job.yaml runtime.strategy = f") == ["fsdp"]  # bash splits at the sign
    assert offered(shell, "hpcaccel render job.yaml runtime.strategy =") == ["ddp", "fsdp", "deepspeed"]
    assert offered(shell, "hpcaccel submit job.yaml --grid runtime.deterministic=t") == ["runtime.deterministic=true"]
    assert "sweep.max_trials=" in offered(shell, "hpcaccel sweep start sweep.yaml sweep.m")
    assert offered(shell, "hpcaccel submit jo") == []  # the shell completes files


def test_clusters_and_their_partitions_are_completed(shell: Shell) -> None:
    profile(shell, "alps", "{host: alps, default: true}", FACTS)
    profile(shell, "eiger", "{host: eiger}", FACTS.replace("gpu-long", "gpu-short"))
    assert offered(shell, "hpcaccel submit job.yaml --cluster ") == ["alps", "eiger", "local", "slurm"]
    assert offered(shell, "hpcaccel cluster probe e") == ["eiger"]
    assert offered(shell, "hpcaccel submit job.yaml slurm.partition = gpu") == ["gpu", "gpu-long"]
    assert offered(shell, "hpcaccel submit job.yaml --cluster eiger slurm.partition=g") == [
        "slurm.partition=gpu", "slurm.partition=gpu-short",
    ]  # fmt: skip
    assert offered(shell, "hpcaccel plan job.yaml --partition d") == ["debug"]
    assert offered(shell, "hpcaccel submit job.yaml --cluster ../../x slurm.partition=") == []


def test_zsh_and_fish_get_descriptions(shell: Shell) -> None:
    zsh = asked(shell, PROGRAM, _HPCACCEL_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="hpcaccel wai")
    assert zsh.startswith("""_arguments '*: :(("wait":"Follow a run until it ends;""")
    assert zsh.endswith("""))'\n""")
    files = asked(shell, PROGRAM, _HPCACCEL_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="hpcaccel submit jo")
    assert files == "_files\n"
    variables = {"_HPCACCEL_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": "hpcaccel sweep sto"}
    fish = asked(shell, PROGRAM, _TYPER_COMPLETE_FISH_ACTION="get-args", **variables)
    assert fish.startswith("stop\t")
    assert "Traceback" not in asked(shell, PROGRAM, _TYPER_COMPLETE_FISH_ACTION="is-args", **variables)


def test_script_of_the_shell_completes_with_this_program(shell: Shell) -> None:
    """As bash does it: the function that Typer's script defines, with bash's own words."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("there is no bash")
    shell.program("hpcaccel", f'exec {sys.executable} -m hpcaccel "$@"')
    script = asked(shell, PROGRAM, _HPCACCEL_COMPLETE="source_bash")
    assert "complete_bash" in script
    lines = (
        script,
        "COMP_WORDS=(hpcaccel submit job.yaml slurm.par); COMP_CWORD=3",
        'function=$(complete -p hpcaccel | sed "s/.*-F \\([^ ]*\\).*/\\1/")',
        '$function hpcaccel; echo "${COMPREPLY[@]}"',
    )
    done = subprocess.run(
        [bash, "--norc", "-c", "\n".join(lines)], env=shell.environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "slurm.partition=\n", done.stderr


def test_completion_imports_neither_typer_nor_pydantic(shell: Shell) -> None:
    code = "import sys; from hpcaccel.cli.quick import run_quickly; run_quickly([]); print(*sorted(sys.modules))"
    variables = {"COMP_WORDS": "hpcaccel submit job.yaml slurm.par", "COMP_CWORD": "3"}
    loaded = asked(shell, [sys.executable, "-c", code], _HPCACCEL_COMPLETE="complete_bash", **variables).split()
    assert loaded[0] == "slurm.partition="
    assert not {"typer", "click", "pydantic", "yaml", "jinja2", "hpcaccel.spec", "hpcaccel.submission"} & set(loaded)


def test_status_watch_ends_with_the_run(shell: Shell) -> None:
    shell.write("train.py", "import time; time.sleep(3)")
    shell.write("job.yaml", "name: gpt\nentrypoint: {script: train.py}\nruntime: {stop: signals}\n")
    shell("submit", "job.yaml", "--cluster", "local")
    said = shell("status", "gpt", "--watch")
    assert said.returncode == 0, said.stderr
    pages = said.stdout.split("\nrun ")
    assert len(pages) >= 2
    assert "state       completed" in pages[-1]
