# ruff: noqa: E501  (error messages are not wrapped)
from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec import load_spec, spec_from_values
from hpcaccel.spec.loading.expand import Elsewhere, expanded_for


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def failure(path: str | Path, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(path, overrides=overrides)
    return caught.value.problems


# -- unreadable files -----------------------------------------------------------------------------------------------


def test_missing_file_error_suggests_the_closest_name(tmp_path: Path) -> None:
    write(tmp_path / "jobs/train.yaml", "x: 1")
    assert failure("jobs/trian.yaml") == ["jobs/trian.yaml: no such file. Did you mean 'jobs/train.yaml'?"]
    assert failure("nowhere/a.yaml") == ["nowhere/a.yaml: no such file"]
    assert failure("train.py/a.yaml") == ["train.py/a.yaml: no such file"]


def test_directory_error_lists_its_yaml_files(tmp_path: Path) -> None:
    write(tmp_path / "jobs/train.yaml", "x: 1")
    assert failure("jobs") == ["jobs is a directory, not a YAML file (it contains train.yaml)"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "f.yaml: the file is empty. Create a spec file with `hpcaccel init`"),
        (b"# only a comment\n", "f.yaml: the file is empty. Create a spec file with `hpcaccel init`"),
        (b"- a\n- b\n", "f.yaml: the file must contain a mapping (name: …, entrypoint: …), not a list"),
        (b"hello\n", "f.yaml: the file must contain a mapping (name: …, entrypoint: …), not a single value"),
        (b"a: b\nc: \xff\n", "f.yaml:2: not UTF-8 text (byte 0xff)"),
        (b"a: b\nc: [d\n", "f.yaml:3: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'"),
        (b"\x7fELF\x00\x01", "f.yaml:1: the character U+007F is not allowed in YAML"),
    ],
)  # fmt: skip
def test_file_that_is_not_a_spec_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "f.yaml").write_bytes(content)
    assert failure("f.yaml") == [problem]


def test_byte_order_mark_and_crlf_line_endings_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_bytes(b"\xef\xbb\xbfname: gpt\r\nentrypoint:\r\n  script: train.py\r\n")
    assert load_spec("f.yaml").name == "gpt"


# -- all errors at once ---------------------------------------------------------------------------------------------


def test_all_errors_are_reported_at_once_with_their_lines(problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOPE", raising=False)
    text = """\
entrypoint:
  script: $SCRATCH/x.py
  args: {m: {a: 1}}
nodes: 4
slurm:
  partitoin: gpu
  time: tomorrow
  mem: 4G
  mem_per_cpu: 2G
runtime: {strategy: dpd, mixed_precision: false}
environment:
  env: {RANK: 1, 1x: 2, X: null, S: "${env:NOPE}"}
  secrets: [A, A, S]
  modules: cuda
  time: 5
checkpoint: {keep: 0}
name: g pt
sweep: {trials: 3}
"""
    slurm = (
        "account, partition, qos, reservation, nodes, ntasks_per_node, cpus_per_task, gpus_per_node, gpus_per_task, gres, "
        "mem, mem_per_cpu, mem_per_gpu, constraint, exclude, nodelist, exclusive, cores_per_socket, cpus_per_gpu, "
        "gpu_bind, hint, licenses, network, oversubscribe, sockets_per_node, switches, threads_per_core, tmp, extra, "
        "time, time_min, comment, mail_type, mail_user, begin, clusters, deadline, dependency, nice, priority, wckey"
    )
    top = "name, entrypoint, slurm, srun, components, environment, launcher, container, stage, after, code, workdir, sharing, runtime, checkpoint, resilience, notify"
    own = "modules, conda, venv, python, setup, setup_per_node, env, secrets"
    assert problems(text, "nodes=abc", whole=True) == [
        "job.yaml:2: entrypoint.script '$SCRATCH/x.py': $SCRATCH is not expanded here. Write ${env:SCRATCH}/x.py",
        "job.yaml:3: entrypoint.args.m is a mapping, which args_style: flags does not support. Write m.<name>: …, or set args_style: equals or key=value",
        f"job.yaml:4: nodes is not a known key (allowed: {top}). Did you mean 'slurm.nodes'?",
        f"job.yaml:6: slurm.partitoin is not a known key (allowed: {slurm}). Did you mean 'partition'?",
        "job.yaml:7: slurm.time 'tomorrow' is not a time (allowed: minutes, minutes:seconds, hours:minutes:seconds, "
        "days-hours, days-hours:minutes, days-hours:minutes:seconds, UNLIMITED)",
        "job.yaml:9: slurm.mem_per_cpu conflicts with mem: set only one of mem, mem_per_cpu, mem_per_gpu",
        "job.yaml:10: runtime.strategy 'dpd' is not valid (allowed: ddp, fsdp, deepspeed). Did you mean 'ddp'?",
        "job.yaml:10: runtime.mixed_precision false is not valid (allowed: no, fp16, bf16, fp8)",
        "job.yaml:12: environment.env.S uses ${env:NOPE}, but NOPE is not set in your environment",
        "job.yaml:12: environment.env.1x '1x' is not a valid environment variable name: use letters, digits and '_', not starting with a digit",
        "job.yaml:12: environment.env.X null must be a string (write '' for an empty string)",
        "job.yaml:12: environment.env.RANK is reserved for hpcaccel and Slurm: remove it",
        "job.yaml:13: environment.secrets.1 'A' is listed twice",
        "job.yaml:13: environment.secrets.2 'S' is also in environment.env, whose values are written to the run directory: "
        "remove it from one of the two",
        "job.yaml:14: environment.modules 'cuda' must be a list",
        f"job.yaml:15: environment.time is not a known key (allowed: {own}). Did you mean 'slurm.time'?",
        "job.yaml:16: checkpoint.keep 0 must be a whole number of at least 1",
        "job.yaml:17: name 'g pt' is not a valid name: use at most 64 letters, digits, '.', '_' and '-', starting "
        "with a letter or digit. It becomes a directory name",
        "job.yaml:18: sweep is for `hpcaccel sweep start`, which runs many trials of this file: use that command, or remove the section",
        "command line: nodes=abc: slurm.nodes 'abc' is not a number of nodes (allowed: 4, 2-4, or a list of sizes such as 1,2,4-8:2)",
    ]  # fmt: skip


def test_missing_key_error_describes_the_key(problems) -> None:
    assert problems("slurm: {}", whole=True) == [
        "job.yaml:1: name is missing. A short name, used for the Slurm job and for the directory of its runs.",
        "job.yaml:1: entrypoint is missing. The program that the ranks run.",
    ]


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "-x", "", "a b", "ü", "x" * 65, "[a]"])
def test_name_unsafe_for_a_directory_is_refused(problems, name: str) -> None:
    (problem,) = problems(f"name: {name!r}\nentrypoint: {{script: train.py}}", whole=True)
    assert problem.startswith(f"job.yaml:1: name {name!r} is not a valid name: use at most 64 letters")


def test_numeric_name_keeps_its_spelling(load) -> None:
    assert load("name: 007\nentrypoint: {script: train.py}", whole=True).name == "007"


def test_empty_section_equals_its_defaults(load) -> None:
    assert load("slurm:\nenvironment:\n  env:\n  modules:\nsrun: {extra: }\n") == load("")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('environment: {setup: ["a\\nb"]}', "environment.setup.0 'a\\nb' contains a line break: a value must be on one line"),
        ('environment: {env: {A: "x\\0"}}', "environment.env.A 'x\\x00' contains a NUL character, which cannot be passed to a program"),
        ('environment: {env: {A: "\\ud800"}}', "environment.env.A '\\ud800' is not valid text: it contains bytes that are not UTF-8, or half of a surrogate pair"),
        ("environment: {env: {HPCACCEL_USE_CPUS: x}}", "environment.env.HPCACCEL_USE_CPUS is reserved for hpcaccel and Slurm: remove it"),
        ("environment: {env: {HPCACCEL_RUN_DIR: x}}", "environment.env.HPCACCEL_RUN_DIR is reserved for hpcaccel and Slurm: remove it"),
        ("environment: {venv: v, python: p}", "environment.python conflicts with venv: set only one of venv, python"),
        ("code: {copy: maybe}", "code.copy 'maybe' must be true or false"),
        ("runtime: {seed: 5000000000}", "runtime.seed 5000000000 must be a whole number of at least 0 and at most 4294967295"),
        ("checkpoint: {every_minutes: 0}", "checkpoint.every_minutes 0 must be a number above 0"),
        ("checkpoint: {resume: }", "checkpoint.resume null must be auto, never or the path of a checkpoint"),
        ("resilience: {max_failures: -1}", "resilience.max_failures -1 must be a whole number of at least 0"),
        ("resilience: {spare_nodes: 1, requeue: false}", "resilience.spare_nodes needs resilience.requeue, and no chain: if the job's first node fails, it has to be requeued. Remove spare_nodes"),
        ("resilience: {spare_nodes: 1, chain: 3}", "resilience.spare_nodes needs resilience.requeue, and no chain: if the job's first node fails, it has to be requeued. Remove spare_nodes"),
        ("resilience: {on_node_loss: shrink}", "resilience.on_node_loss shrink needs several sizes in slurm.nodes: write a range such as 3-4, or a list of sizes"),
        ("resilience: {requeue: 1}", "resilience.requeue 1 must be true, false or expedite"),
        ("workdir: $WORK/x", "workdir '$WORK/x': $WORK is not expanded here. Write ${env:WORK}/x"),
        ("workdir: ${WORK}/x", "workdir '${WORK}/x': $WORK is not expanded here. Write ${env:WORK}/x"),
        ("workdir: ${env:1x}", "workdir '${env:1x}' is not valid: write ${env:NAME} with the name of an environment variable"),
    ],
)  # fmt: skip
def test_invalid_value_is_refused(problems, text: str, problem: str) -> None:
    assert problems(text) == [f"job.yaml:3: {problem}"]


def test_value_over_100_kb_is_refused_and_truncated_in_the_error(problems) -> None:
    (problem,) = problems(f"environment: {{env: {{A: '{'x' * 100_001}'}}}}")
    assert problem.endswith("...' is 100001 bytes long (at most 100000)")
    assert len(problem) < 200


# -- expansion of values and paths ----------------------------------------------------------------------------------


def test_only_env_references_and_leading_tilde_slash_are_expanded(load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "a$b ${env:WHO}")
    spec = load("""
environment:
  env: {A: $HOME, B: "x${env:WHO}y", C: "$${env:WHO}", D: ~/data, E: a~/b, F: "~ada/x", G: "~"}
""")
    assert spec.environment.env == {
        "A": "$HOME",
        "B": "xa$b ${env:WHO}y",
        "C": "${env:WHO}",
        "D": "/home/ada/data",
        "E": "a~/b",
        "F": "~ada/x",
        "G": "~",
    }


def test_numbers_and_booleans_may_come_from_the_environment(load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N", "4")
    monkeypatch.setenv("YES", "true")
    spec = load("slurm: {nodes: '${env:N}', cpus_per_task: '${env:N}'}\nruntime: {deterministic: '${env:YES}'}")
    assert (spec.slurm.nodes, spec.slurm.cpus_per_task, spec.runtime.deterministic) == ("4", 4, True)


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/data")
    write(tmp_path / "jobs/train.py", "")
    write(
        tmp_path / "jobs/job.yaml",
        "name: a\nentrypoint: {script: ./train.py}\nworkdir: ..\nenvironment: {venv: ~/v}\n"
        "checkpoint: {resume: '${env:DATA}/step'}\ncode: {exclude: ['./data']}\n",
    )
    spec = load_spec("jobs/job.yaml", overrides=["environment.conda=./env"])
    assert spec.source == tmp_path / "jobs/job.yaml"
    assert spec.entrypoint.script == str(tmp_path / "jobs/train.py")
    assert spec.workdir == str(tmp_path)
    assert load_spec("jobs/job.yaml", overrides=["workdir='~'"]).workdir == "/home/ada"
    assert spec.environment.conda == str(tmp_path / "jobs/env")
    assert spec.environment.venv is None, "conda on the command line rules out the file's venv"
    assert spec.checkpoint.resume == "/data/step"
    assert spec.code.exclude == ["./data"]


def test_remote_spec_uses_remote_environment_except_for_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERE", "base")
    monkeypatch.setenv("PLACE", "/here")
    write(
        tmp_path / "base.yaml", "name: x\nslurm: {nodes: '${env:COUNT}'}\nentrypoint: {script: 'sub/${env:HERE}.py'}\n"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.py").touch()
    text = (
        "extends: ${env:HERE}.yaml\nworkdir: ${env:PLACE}/../w\ncontainer: {image: ~/x.sif, mounts: ['~/data:/data']}\n"
    )
    file = write(tmp_path / "job.yaml", text)
    with expanded_for(Elsewhere("alps", {"PLACE": "/there/p", "COUNT": "4"}.get)):
        spec = load_spec(file)
        assert spec.entrypoint.script == str(tmp_path / "sub" / "base.py")
        assert (spec.workdir, spec.slurm.nodes) == ("/there/w", "4")
        assert spec.container is not None
        assert (spec.container.image, spec.container.mounts) == ("~/x.sif", ["~/data:/data"])
        tool = load_spec(file, overrides=["entrypoint.script=null", "entrypoint.command=[/soft/tool]"])
        assert tool.entrypoint.command == ["/soft/tool"], "nobody looks for it here"
        assert failure(file, "entrypoint.script=null", "entrypoint.command=[./tool]")[0].endswith("is not a file")
        for setting in ("container.image=./x.sif", "container.mounts=[data:/data]", "entrypoint.command=[../tool]"):
            (problem,) = failure(file, "entrypoint.script=null", setting, "entrypoint.args=null")[:1]
            assert "is relative to this file, but the job runs on alps" in problem
        assert "HERE is not set on alps" in failure(file, "args.x=${env:HERE}")[0]


def test_remote_environment_does_not_select_what_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHICH", "mine")
    file = write(
        tmp_path / "job.yaml",
        "name: x\nentrypoint: {module: '${env:WHICH}'}\nenvironment: {secrets: ['${env:WHICH}'], env: {A: '${env:WHICH}'}}\n"
        "code: {include: ['${env:WHICH}/*'], exclude: ['${env:WHICH}.*']}\n",
    )
    with expanded_for(Elsewhere("alps", {"WHICH": "theirs", "SOFT": str(tmp_path)}.get)):
        spec = load_spec(file)
        assert (spec.environment.secrets, spec.entrypoint.module) == (["mine"], "mine")
        assert (spec.code.include, spec.code.exclude) == (["mine/*"], ["mine.*"])
        assert spec.environment.env == {"A": "theirs"}
        program = ["entrypoint.module=null", "entrypoint.command=['${env:SOFT}/bin/tool']"]
        assert "write the path relative to this file: ./run.sh" in failure(file, *program)[0]
    with expanded_for(Elsewhere("alps", {"WHICH": "theirs", "SOFT": "/soft"}.get)):
        assert load_spec(file, overrides=program).entrypoint.command == ["/soft/bin/tool"]


def test_names_without_a_slash_are_not_treated_as_paths(load) -> None:
    spec = load("entrypoint: {command: [bash]}\nenvironment: {conda: torch, python: python3.11}")
    assert (spec.entrypoint.command, spec.environment.conda, spec.environment.python) == (
        ["bash"],
        "torch",
        "python3.11",
    )


# -- extends --------------------------------------------------------------------------------------------------------


def test_a_base_is_merged_key_by_key_and_lists_are_replaced(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "")
    write(
        tmp_path / "site/base.yaml",
        "name: base\nslurm: {partition: gpu, mem: 40G, gres: 'gpu:2'}\nentrypoint: {script: own.py, args: {a: 1, b: 2}}\n"
        "environment: {modules: [x, y], env: {A: a}}\nworkdir: here\n",
    )
    write(tmp_path / "mid.yaml", "extends: site/base.yaml\nslurm: {mem_per_cpu: 2G}\nenvironment: {modules: [z]}\n")
    write(
        tmp_path / "job.yaml",
        "extends: mid.yaml\nname: top\nentrypoint: {module: pkg.train, args: {b: 3, c: 4}}\nslurm: {gpus_per_node: 4}\n"
        "environment: {env: {B: b}}\n",
    )
    spec = load_spec("job.yaml")
    assert spec.name == "top"
    assert spec.arguments() == ["--a", "1", "--b", "3", "--c", "4"]
    assert (spec.entrypoint.kind, spec.entrypoint.script) == ("module", None)
    assert dict(spec.slurm.flags())["partition"] == "gpu"
    assert (spec.slurm.mem, spec.slurm.mem_per_cpu, spec.slurm.gres, spec.slurm.gpus_per_node) == (
        None,
        "2G",
        None,
        "4",
    )
    assert spec.environment.modules == ["z"]
    assert spec.environment.env == {"A": "a", "B": "b"}
    assert spec.workdir == str(tmp_path / "site/here")


def test_script_in_a_base_is_relative_to_the_base(tmp_path: Path) -> None:
    write(tmp_path / "site/own.py", "")
    write(tmp_path / "site/base.yaml", "entrypoint: {script: own.py}\n")
    write(tmp_path / "job.yaml", "extends: site/base.yaml\nname: a\n")
    assert load_spec("job.yaml").entrypoint.script == str(tmp_path / "site/own.py")


def test_errors_in_a_base_name_the_base_file(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "slurm:\n  tmie: 5\n  mem: lots\nslurm: {}\n")
    write(tmp_path / "job.yaml", "extends: base.yaml\nname: a\nentrypoint: {script: train.py}\nslurm: {nodes: x}\n")
    lines = failure("job.yaml")
    assert [line.split(" ")[0:2] for line in lines] == [
        ["base.yaml:2:", "slurm.tmie"],
        ["base.yaml:3:", "slurm.mem"],
        ["base.yaml:4:", "slurm"],
        ["job.yaml:4:", "slurm.nodes"],
    ]


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("extends: job.yaml", "job.yaml:1: extends 'base.yaml': base.yaml:1: extends 'job.yaml' forms a cycle: job.yaml → base.yaml → job.yaml"),
        ("extends: gone.yaml", "job.yaml:1: extends 'base.yaml': base.yaml:1: extends 'gone.yaml': gone.yaml: no such file. Did you mean 'job.yaml'?"),
        ("", "job.yaml:1: extends 'base.yaml': base.yaml: the file is empty. Create a spec file with `hpcaccel init`"),
        ("extends: [a, b]", "base.yaml:1: extends must be the path of one file, such as base.yaml"),
    ],
)  # fmt: skip
def test_invalid_base_is_refused(tmp_path: Path, base: str, problem: str) -> None:
    write(tmp_path / "base.yaml", base)
    write(tmp_path / "job.yaml", "extends: base.yaml\nname: a\nentrypoint: {script: train.py}\n")
    assert failure("job.yaml") == [problem]


def test_conflict_within_one_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "slurm: {mem_per_gpu: 1G}\n")
    write(
        tmp_path / "job.yaml",
        "extends: base.yaml\nname: a\nentrypoint: {script: train.py}\nslurm: {mem: 1G, mem_per_cpu: 1G}\n",
    )
    assert failure("job.yaml") == [
        "job.yaml:4: slurm.mem_per_cpu conflicts with mem: set only one of mem, mem_per_cpu, mem_per_gpu"
    ]


# -- from Python ----------------------------------------------------------------------------------------------------


def test_spec_from_python_values_follows_the_file_rules(tmp_path: Path) -> None:
    spec = spec_from_values(
        {"name": "a", "entrypoint": {"script": Path("train.py"), "args": {"lr": 3e-4, "out": Path("x")}}},
        base=tmp_path,
        overrides=["nodes=2"],
    )
    assert spec.entrypoint.script == str(tmp_path / "train.py")
    assert spec.arguments() == ["--lr", "3e-4", "--out", "x"]
    assert spec.slurm.nodes == "2"
    with pytest.raises(SpecError, match=r"^spec: slurm\.nodse is not a known key"):
        spec_from_values({"name": "a", "entrypoint": {"module": "m"}, "slurm": {"nodse": 2}})


def test_python_values_may_name_a_function() -> None:
    assert spec_from_values({"name": "a", "entrypoint": {"function": "train"}}).entrypoint.kind == "function"


@pytest.mark.parametrize("name", ["HPCACCEL_USE_CPU", "HPCACCEL_ALONE", "HPCACCEL_GPUS_PER_TASK", "HPCACCEL_LOG_LEVEL",
                                  "HPCACCEL_SAMPLE_SECONDS"])  # fmt: skip
def test_documented_hpcaccel_variables_may_be_set(load, name: str) -> None:
    assert load(f"environment: {{env: {{{name}: '1'}}}}").environment.env == {name: "1"}
