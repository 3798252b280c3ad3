# ruff: noqa: E501  (error messages are not wrapped)
from __future__ import annotations

import pytest

from hpcaccel.errors import presentable


def test_override_key_may_omit_its_section(load) -> None:
    spec = load(
        "slurm: {nodes: 1}\nentrypoint: {script: train.py, args: {lr: 1.0, depth: 4}}",
        "args.lr=1e-3", "nodes=4", "slurm.time=10:00", "keep=5", "env.A=no", "name=other", "resilience.requeue=false", "fsdp.wrap=[Block]",
    )  # fmt: skip
    assert spec.arguments() == ["--lr", "1e-3", "--depth", "4"]
    assert (spec.slurm.nodes, spec.slurm.time, spec.checkpoint.keep, spec.name) == ("4", "00:10:00", 5, "other")
    assert spec.environment.env == {"A": "no"}
    assert spec.resilience.requeue is False
    assert spec.runtime.fsdp.wrap == ["Block"]


def test_override_value_needs_no_quoting(load) -> None:
    spec = load(
        "", "comment=it's a: b # c", "args.x=[1, a b]", "env.N='7'", "env.S=$X ", "args.t=true", "exclusive=true"
    )
    assert spec.slurm.comment == "it's a: b # c"
    assert spec.arguments() == ["--x", "1", "a b", "--t"]
    assert spec.environment.env == {"N": "7", "S": "$X "}
    assert spec.slurm.exclusive is True


def test_override_replaces_a_whole_mapping_and_null_removes_a_value(load) -> None:
    text = "entrypoint: {script: train.py, args: {a: 1, b: 2}}\nslurm: {partition: gpu}"
    assert load(text, "args={c: 3}").arguments() == ["--c", "3"]
    assert load(text, "args.a=null", "partition=null").arguments() == ["--b", "2"]


def test_override_removes_conflicting_values_of_the_file(load, problems) -> None:
    text = "slurm: {mem: 40G, gpus_per_node: 2}"
    slurm = load(text, "mem_per_cpu=2G", "gres=gpu:4").slurm
    assert (slurm.mem, slurm.mem_per_cpu, slurm.gpus_per_node, slurm.gres) == (None, "2G", None, "gpu:4")
    assert load(text, "gres=nvme:1").slurm.gpus_per_node == "2"
    assert problems(text, "mem=1G", "mem_per_cpu=1G") == [
        "command line: mem_per_cpu=1G: slurm.mem_per_cpu conflicts with mem: set only one of mem, mem_per_cpu, mem_per_gpu"
    ]


def test_dotted_override_enters_a_mapping_only_if_it_exists(load) -> None:
    text = "entrypoint: {script: train.py, args_style: key=value, args: {model: {depth: 4}, opt.lr: 1}}"
    overrides = ("args.model.depth=8", "args.opt.lr=2", "args.new.key=3")
    assert load(text, *overrides).arguments() == ["model.depth=8", "opt.lr=2", "new.key=3"]


def test_last_override_of_a_key_wins(load) -> None:
    assert load("", "nodes=2", "nodes=3").slurm.nodes == "3"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("exclude=n1", "exclude is ambiguous: write slurm.exclude or code.exclude"),
        ("extra.foo=1", "extra.foo is ambiguous: write slurm.extra.foo or srun.extra.foo"),
        ("nodse=4", "nodse is not a known key. Did you mean 'slurm.nodes'?"),
        ("slrum.nodes=4", "slrum.nodes is not a known key. Did you mean 'slurm.nodes'?"),
        ("checkpoint.kepe=4", "checkpoint.kepe is not a known key (allowed: every_steps, every_minutes, background, when_busy, snapshot_every_steps, snapshot_replicas, keep, keep_every_steps, resume, watch). Did you mean 'keep'?"),
        ("slurm.signal=USR1", "slurm.signal is set by resilience.warning_seconds"),
        ("signal=USR1", "signal is set by resilience.warning_seconds"),
        ("extends=x.yaml", "extends is allowed only at the top level of a spec file"),
        ("checkpoint=4", "checkpoint is a section: set one of its keys (every_steps, every_minutes, background, when_busy, snapshot_every_steps, snapshot_replicas, keep, keep_every_steps, resume, watch)"),
        ("entrypoint.function=f", None),
        ("nodes", "an override must have the form key=value, such as nodes=4"),
        ("=4", "an override must have the form key=value, such as nodes=4"),
        ("modules.0=x", "environment.modules is a list here: set the whole list, environment.modules=[a, b]"),
        ("args.x=[1", "not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'. A value that starts with a bracket or a quote is parsed as YAML: quote all of it to pass a string"),
        ("args.x='a' b", "not valid YAML: expected '<document start>', but found '<scalar>'. A value that starts with a bracket or a quote is parsed as YAML: quote all of it to pass a string"),
        ("wrap=5", None),
        ("fsdp.warp=5", "runtime.fsdp.warp is not a known key (allowed: wrap, reshard_after_forward, shard_size, param_dtype, reduce_dtype, output_dtype, cpu_offload). Did you mean 'wrap'?"),
        ("keep=none", "checkpoint.keep 'none' must be a whole number of at least 1"),
        ("env.A=\udcff", "environment.env.A '\\udcff' is not valid text: it contains bytes that are not UTF-8, or half of a surrogate pair"),
    ],
)  # fmt: skip
def test_error_in_an_override_quotes_the_override(problems, override: str, problem: str | None) -> None:
    lines = problems("environment: {modules: [a]}", override)
    assert len(lines) == 1
    shown = presentable(override)
    assert lines[0].startswith(f"command line: {shown}: ")
    if problem is not None:
        assert lines[0] == f"command line: {shown}: {problem}"


def test_long_override_is_truncated_in_the_error(problems) -> None:
    (line,) = problems("", "nodes=" + "x" * 1000)
    assert line.startswith("command line: nodes=" + "x" * 71 + "...: slurm.nodes 'xxx")
    assert len(line) < 300


def test_override_paths_are_relative_to_the_file(load, tmp_path) -> None:
    assert load("", "workdir=out").workdir == str(tmp_path / "out")
