from __future__ import annotations

import pytest

from hpcaccel.errors import UserError
from hpcaccel.launch.arguments import parse
from hpcaccel.launch.flags import BY_NAME, GROUPS


@pytest.mark.parametrize(
    "words",
    [
        ["--num-processes", "2", "--mixed-precision=bf16", "train.py"],
        ["--num_processes=2", "--mixed_precision", "BF16", "train.py"],
    ],
)
def test_dashes_underscores_and_equals_signs_are_the_same(words: list[str]) -> None:
    assert parse(words).values == {"num_processes": 2, "mixed_precision": "bf16"}


def test_names_of_torchrun_and_of_accelerate_are_the_same() -> None:
    theirs = parse(["--node-rank=1", "--master-addr", "a", "--master_port", "1", "train.py"])
    ours = parse(["--machine_rank=1", "--main_process_ip", "a", "--main-process-port", "1", "train.py"])
    assert theirs == ours


def test_what_follows_the_script_is_the_scripts() -> None:
    found = parse(["--cpu", "train.py", "--cpu", "--", "-x", "--num_processes=9", ""])
    assert found.values == {"cpu": True}
    assert (found.script, found.script_args) == ("train.py", ("--cpu", "--", "-x", "--num_processes=9", ""))


def test_two_dashes_end_the_flags() -> None:
    found = parse(["--module", "--", "-odd"])
    assert (found.values, found.script) == ({"module": True}, "-odd")


def test_short_forms() -> None:
    found = parse(["-m", "-q", "-t3", "-r", "1:3", "package.train", "-m"])
    assert found.values == {"module": True, "quiet": True, "tee": "3", "redirects": "1:3"}
    assert found.script_args == ("-m",)


def test_booleans_have_values_and_switches_may_have_one() -> None:
    found = parse(["--fsdp-activation-checkpointing=TRUE", "--debug=false", "--zero3_init_flag", "false", "t.py"])
    assert found.values == {"fsdp_activation_checkpointing": True, "debug": False, "zero3_init_flag": False}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-procesess=2", "t.py"], "no flag --num-procesess. Did you mean --num-processes?"),
        (["--mixed_precison", "fp16", "t.py"], "no flag --mixed_precison. Did you mean --mixed-precision?"),
        (["--learning-rate-of-mine=1", "t.py"], "Flags of the script come after the script"),
        (["-x", "t.py"], "no flag -x"),
        (["--num-processes", "two", "t.py"], "--num-processes 'two' must be a whole number"),
        (["--monitor-interval", "x", "t.py"], "--monitor-interval 'x' must be a number"),
        (["--mixed-precision", "fp17", "t.py"], "'fp17' is not valid (allowed: no, fp16, bf16, fp8)"),
        (
            ["--parallelism-config-cp-comm-strategy", "ring", "t.py"],
            "--parallelism-config-cp-comm-strategy 'ring' is not valid (allowed: allgather, alltoall)",
        ),
        (["--parallelism-config-sp-backend=torch", "t.py"], "'torch' is not valid (allowed: deepspeed)"),
        (["--fsdp-offload-params", "maybe", "t.py"], "--fsdp-offload-params 'maybe' must be true or false"),
        (["--num-processes", "--cpu", "t.py"], "--num-processes needs a value, such as --num-processes 2"),
        (["--zero-stage"], "--zero-stage needs a value, such as --zero-stage 3"),
        (["--cpu"], "the script is missing: hpcaccel launch [FLAGS] script.py [ARGUMENTS]"),
        (["--use_megatron_lm", "t.py"], "--use_megatron_lm: hpcaccel does not support Megatron-LM"),
        (["--megatron_lm_tp_degree=2", "t.py"], "hpcaccel does not support Megatron-LM"),
        (["--aws_access_key_id", "x", "t.py"], "hpcaccel starts no jobs on SageMaker"),
    ],
)
def test_wrong_command_lines_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(words)
    assert message in str(caught.value)


def test_no_name_stands_for_two_flags() -> None:
    names = [name for flags in GROUPS.values() for flag in flags for name in (flag.name, *flag.also)]
    assert len(names) == len(set(names)) == len(BY_NAME)


def test_every_flag_of_torchrun_is_known() -> None:
    run = pytest.importorskip("torch.distributed.run")
    options = [text for action in run.get_args_parser()._actions for text in action.option_strings]
    assert {text.removeprefix("--").replace("-", "_") for text in options if text.startswith("--")} <= BY_NAME.keys()
    assert {text for text in options if not text.startswith("--")} <= BY_NAME.keys()


def test_every_flag_of_accelerates_launcher_is_known_or_refused_with_a_reason() -> None:
    theirs = pytest.importorskip("accelerate.commands.launch").launch_command_parser()
    options = {text for action in theirs._actions for text in action.option_strings if text.startswith("--")}
    unknown = sorted(text for text in options if text[2:].replace("-", "_") not in BY_NAME)
    assert len(options) > 150
    for text in unknown:
        with pytest.raises(UserError, match=r"does not support Megatron-LM|starts no jobs on SageMaker"):
            parse([text, "1", "t.py"])
