from __future__ import annotations

import pytest


def test_slurm_section_becomes_sbatch_flags(load) -> None:
    spec = load("""
slurm:
  partition: [gpu, gpu0]
  account: 0123
  nodes: 2-4
  gpus_per_node: a100:2
  mem: 40000
  time: 1-12
  exclude: n[01,03-05]
  exclusive: true
  oversubscribe: false
  comment: 'a "b" $(c) # d'
  mail_type: END, FAIL
  extra: {switches-count: 1, spread-job: true, off: false, bb: 'x y'}
""")
    assert spec.slurm.flags() == [
        ("account", "0123"),
        ("partition", "gpu,gpu0"),
        ("nodes", "2-4"),
        ("ntasks-per-node", "2"),
        ("gpus-per-node", "a100:2"),
        ("mem", "40000M"),
        ("exclude", "n[01,03-05]"),
        ("exclusive", None),
        ("time", "1-12:00:00"),
        ("comment", 'a "b" $(c) # d'),
        ("mail-type", "END, FAIL"),
        ("switches-count", "1"),
        ("spread-job", None),
        ("bb", "x y"),
    ]


def test_empty_slurm_section_gives_the_default_flags(load) -> None:
    assert load("").slurm.flags() == [("nodes", "1"), ("ntasks-per-node", "1"), ("time", "01:00:00")]


@pytest.mark.parametrize(
    ("slurm", "ranks", "gpus"),
    [
        ("{}", 1, 0),
        ("{gpus_per_node: 4}", 4, 4),
        ("{gpus_per_node: 'a100:2,v100:1'}", 3, 3),
        ("{gres: 'gpu:h100:8,shard:2'}", 8, 8),
        ("{gres: 'shard:2'}", 1, 0),
        ("{gpus_per_task: 1}", 1, 1),
        ("{gpus_per_task: 2, ntasks_per_node: 3}", 3, 6),
        ("{gpus_per_node: 4, ntasks_per_node: 1}", 1, 4),
        ("{gpus_per_node: 0}", 1, 0),
    ],
)
def test_ranks_per_node_default_to_gpus_per_node(load, slurm: str, ranks: int, gpus: int) -> None:
    spec = load(f"slurm: {slurm}")
    assert (spec.ranks_per_node, spec.slurm.node_gpus) == (ranks, gpus)


def test_zero_gpus_are_not_requested(load) -> None:
    assert "gpus-per-node" not in dict(load("slurm: {gpus_per_node: 0}").slurm.flags())


def test_slurm_quantities_are_available_as_numbers(load) -> None:
    slurm = load("slurm: {nodes: 2-4, time: 10:00, mem: 1.5T}").slurm
    assert (slurm.min_nodes, slurm.max_nodes, slurm.time_seconds, slurm.mem_megabytes) == (2, 4, 600, 1536 * 1024)
    assert load("slurm: {time: infinite}").slurm.time_seconds is None
    assert load("").slurm.mem_megabytes is None


@pytest.mark.parametrize(
    ("slurm", "problem"),
    [
        ("{signal: B:USR1@60}", "slurm.signal is set by resilience.warning_seconds"),
        ("{requeue: true}", "slurm.requeue is set by resilience.requeue"),
        (
            "{output: x.log}",
            "slurm.output cannot be set: rank logs are written to the run directory (see `hpcaccel logs`)",
        ),
        ("{array: 1-4}", "slurm.array cannot be set: use `hpcaccel submit --grid`"),
        (
            "{ntasks: 4}",
            "slurm.ntasks is computed as nodes × ntasks_per_node: set slurm.nodes and slurm.ntasks_per_node",
        ),
        ("{extra: {signal: USR1}}", "slurm.extra.signal is set by resilience.warning_seconds"),
        ("{extra: {no-requeue: true}}", "slurm.extra.no-requeue is set by resilience.requeue: false"),
        ("{extra: {sig: USR1}}", "slurm.extra.sig is short for signal, which is set by resilience.warning_seconds"),
        ("{extra: {cpus-per-task: 4}}", "slurm.extra.cpus-per-task is set by slurm.cpus_per_task"),
        (
            "{extra: {--foo: 1}}",
            "slurm.extra has the key '--foo': write the long name of an sbatch option without leading dashes",
        ),
        ("{extra: {foo: [1]}}", "slurm.extra foo: must be a string or a number, or true for an option without a value"),
        ("{extra: [foo]}", "slurm.extra must be a mapping of sbatch option names to values: {bb: capacity=1TB}"),
        (
            "{mem: 4G, mem_per_gpu: 4G}",
            "slurm.mem_per_gpu conflicts with mem: set only one of mem, mem_per_cpu, mem_per_gpu",
        ),
        (
            "{gpus_per_node: 2, gres: 'gpu:2'}",
            "slurm.gres conflicts with gpus_per_node: request GPUs with only one of gpus_per_node, gpus_per_task, gres",
        ),
        (
            "{gpus_per_node: a100}",
            "slurm.gpus_per_node 'a100' is not a number of GPUs (allowed: 2, or type:number such as a100:2)",
        ),
        (
            "{nodes: 2.5}",
            "slurm.nodes 2.5 is not a number of nodes (allowed: 4, 2-4, or a list of sizes such as 1,2,4-8:2)",
        ),
        (
            "{nodes: true}",
            "slurm.nodes true is not a number of nodes (allowed: 4, 2-4, or a list of sizes such as 1,2,4-8:2)",
        ),
        ("{cpus_per_task: 0}", "slurm.cpus_per_task 0 must be a whole number of at least 1"),
        ("{cpus_per_task: many}", "slurm.cpus_per_task 'many' must be a whole number of at least 1"),
        ("{cpus_per_task: true}", "slurm.cpus_per_task true must be a whole number of at least 1"),
        ("{account: ''}", "slurm.account '' must not be empty"),
        ("{account: [a, b]}", "slurm.account must be a string"),
        ('{comment: "a\\nb"}', "slurm.comment 'a\\nb' contains a line break: a value must be on one line"),
        ("{exclusive: never}", "slurm.exclusive 'never' must be true, false, user, mcs or topo"),
        ("5", "slurm 5 must be a mapping"),
    ],
)
def test_invalid_slurm_value_is_refused(problems, slurm: str, problem: str) -> None:
    assert problems(f"slurm: {slurm}") == [f"job.yaml:3: {problem}"]


def test_gres_without_gpus_may_be_combined_with_gpus_per_node(load) -> None:
    flags = dict(load("slurm: {gpus_per_node: 2, gres: 'nvme:1'}").slurm.flags())
    assert (flags["gpus-per-node"], flags["gres"]) == ("2", "nvme:1")


def test_srun_flags_are_passed_through_unless_hpcaccel_sets_them(load, problems) -> None:
    assert load("srun: {extra: [--cpu-bind=none, --mem-bind, local]}").srun.extra == [
        "--cpu-bind=none",
        "--mem-bind",
        "local",
    ]
    assert problems("srun: {extra: [none, --export=ALL, --unbuf, -n4]}") == [
        "job.yaml:3: srun.extra.0 must start with an srun flag, such as --cpu-bind=none, not 'none'",
        "job.yaml:3: srun.extra.1 '--export=ALL' sets --export, which hpcaccel sets itself",
        "job.yaml:3: srun.extra.2 '--unbuf' sets --unbuffered, which hpcaccel sets itself",
        "job.yaml:3: srun.extra.3 '-n4' sets --ntasks, which hpcaccel sets itself",
    ]
