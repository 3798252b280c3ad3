"""Accelerate's configuration file: where it is found, what is read, and what the messages are."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcaccel.core.default_config import basic_config, config_folder, to_json
from hpcaccel.errors import SpecError, UserError
from hpcaccel.launch.config_update import update_config
from hpcaccel.launch.launch_config import KEY_KINDS, LaunchConfig, find_config, load_config, save_config


def written(tmp_path: Path, text: str, name: str = "default_config.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HOME": "/hf", "XDG_CACHE_HOME": "/cache"}, "/hf/accelerate"),
        ({"HF_HOME": "", "XDG_CACHE_HOME": "/cache"}, "/cache/huggingface/accelerate"),
        ({"HF_HOME": "~/hf"}, "HOME/hf/accelerate"),
        ({}, "HOME/.cache/huggingface/accelerate"),
    ],
)
def test_folder_is_the_one_that_accelerate_uses(variables: dict[str, str], folder: str) -> None:
    assert config_folder(variables) == Path(folder.replace("HOME", os.environ["HOME"]))


def test_file_is_found_by_path_then_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_config(None) is None
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    found = []
    for name in ("default_config.json", "default_config.yml", "default_config.yaml"):
        written(tmp_path / "accelerate", "{}", name)
        path = find_config(None)
        assert path is not None
        found.append(path.name)
    assert found == ["default_config.json", "default_config.yml", "default_config.yaml"]
    own = written(tmp_path, "{}", "own.yaml")
    assert find_config(str(own)) == own
    with pytest.raises(UserError, match=r"there is no configuration file '/nowhere\.yaml'"):
        find_config("/nowhere.yaml")


def test_keys_are_those_of_accelerate() -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    theirs = {field.name for field in dataclasses.fields(config_args.ClusterConfig)}
    assert set(KEY_KINDS) == theirs


def test_keys_of_sections_are_the_arguments_of_accelerates_launcher() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    from hpcaccel.launch.config_sections import SECTIONS

    known = set(vars(launch.launch_command_parser().parse_args(["train.py"])))
    ours = {prefix + key for prefix, keys in SECTIONS.values() for key in keys}
    prefixes = tuple(prefix for prefix, _ in SECTIONS.values() if prefix)
    theirs = {name for name in known if name.startswith(prefixes)}
    assert theirs <= ours
    retired = {"fsdp_backward_prefetch_policy", "fsdp_ignored_modules", "mpirun_ccl"}
    asked = {"fp8_amax_history_length", "fp8_amax_compute_algorithm", "fp8_optimization_level"}
    assert ours - known == retired | asked, "written by its questions, or by older versions"


FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_version: 2
  reshard_after_forward: true
  fsdp_transformer_layer_cls_to_wrap: Block
mixed_precision: bf16
num_processes: 8
gpu_ids: 0
tpu_env: []
use_cpu: false
"""


def test_values_are_read_as_accelerate_reads_them(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, FSDP))
    assert config == LaunchConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="FSDP",
        downcast_bf16=False,
        fsdp_config={
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_transformer_layer_cls_to_wrap": "Block",
        },
        mixed_precision="bf16",
        num_processes=8,
        gpu_ids="0",
        tpu_env=[],
        use_cpu=False,
    )
    assert config.main_process_ip is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("distributed_type: NO\nmixed_precision: no", {"distributed_type": "NO", "mixed_precision": "no"}),
        ("distributed_type: TPU", {"distributed_type": "XLA"}),
        ("fp16: true", {"mixed_precision": "fp16"}),
        ("dynamo_backend: INDUCTOR", {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}),
        ("dynamo_backend: 'NO'", {"dynamo_config": {}}),
        ("dynamo_backend: no", {"dynamo_config": {}}),
        ("dynamo_config: {backend: EAGER}", {"dynamo_config": {"dynamo_backend": "EAGER"}}),
        ("ipex_config: {ipex: true}", {"retired": ("ipex_config",)}),
        ("main_process_port: null\ndeepspeed_config: {}", {"deepspeed_config": {}}),
        (
            "deepspeed_config: {zero_stage: '3', gradient_clipping: auto, gradient_accumulation_steps: auto}",
            {
                "deepspeed_config": {
                    "zero_stage": "3",
                    "gradient_clipping": "auto",
                    "gradient_accumulation_steps": "auto",
                }
            },
        ),
        ("fp8_config: {backend: TE, fp8_format: E4M3}", {"fp8_config": {"fp8_backend": "TE", "fp8_format": "E4M3"}}),
    ],
)
def test_old_and_short_spellings(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    assert load_config(written(tmp_path, text)) == LaunchConfig(**expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_procesess: 4", ":1: num_procesess is not a known key. Did you mean 'num_processes'?"),
        (
            "debug: false\nfsdp_config:\n  fsdp_versoin: 2\n",
            ":3: fsdp_config.fsdp_versoin is not a known key. Did you mean 'fsdp_version'?",
        ),
        ("num_processes: many", ":1: num_processes 'many' must be a whole number"),
        ("num_processes: true", ":1: num_processes True must be a whole number"),
        ("use_cpu: 3", ":1: use_cpu 3 must be true or false"),
        ("tpu_env: A=1", ":1: tpu_env 'A=1' must be a list"),
        ("fsdp_config: 2", ":1: fsdp_config 2 must be a mapping"),
        (
            "fsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: 7\n",
            ":3: fsdp_config.fsdp_offload_params 7 must be true or false",
        ),
        ("fsdp_config: {version: two}", ":1: fsdp_config.version 'two' must be a whole number"),
        ("fsdp_config: {fsdp_state_dict_type: [a]}", "fsdp_config.fsdp_state_dict_type ['a'] must be a single value"),
        ("deepspeed_config: {zero_stage: auto}", ":1: deepspeed_config.zero_stage 'auto' must be a whole number"),
        ("deepspeed_config: {zero_stage: 2.5}", ":1: deepspeed_config.zero_stage 2.5 must be a whole number"),
        ("deepspeed_config: {gradient_clipping: much}", "gradient_clipping 'much' must be a number, or auto"),
        (
            "parallelism_config: {parallelism_config_tp_size: two}",
            ":1: parallelism_config.parallelism_config_tp_size 'two' must be a whole number",
        ),
        ("parallelism_config: {parallelism_config_cp_size: 0}", "parallelism_config_cp_size 0 must be at least 1"),
        ("parallelism_config: {parallelism_config_cp_comm_strategy: ring}", "'ring' is not valid (allowed: allgather,"),
        ("distributed_type: MULTI-GPU", ". Did you mean 'MULTI_GPU'?"),
        ("mixed_precision: bf61", ":1: mixed_precision 'bf61' is not valid (allowed: no, fp16, bf16, fp8)"),
        ("compute_environment: AMAZON_SAGEMAKER", "hpcaccel starts no jobs on SageMaker"),
        ("- a", ":1: the file must be a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_mistake_is_reported_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SpecError) as raised:
        load_config(path)
    assert str(raised.value).startswith(str(path))
    assert message in str(raised.value)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        load_config(written(tmp_path, "use_cpu: 3\nnum_machine: 1\n"))
    assert [one.partition(": ")[0].rpartition(":")[2] for one in raised.value.problems] == ["1", "2"]


def test_broken_json_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"default_config.json:2: not valid JSON"):
        load_config(written(tmp_path, '{"debug": false,\n}', "default_config.json"))


def test_json_with_tabs_is_no_yaml_and_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, '{\n\t"num_processes": 4\n}', "default_config.json")
    assert load_config(path).num_processes == 4


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_saved_file_loads_as_the_same_configuration_here_and_in_accelerate(tmp_path: Path, name: str) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    config = load_config(written(tmp_path, FSDP))
    path = tmp_path / "new" / name
    save_config(config, path)
    assert load_config(path) == config
    theirs = config_args.load_config_from_file(str(path))
    assert (theirs.num_processes, theirs.distributed_type.value, theirs.mixed_precision) == (8, "FSDP", "bf16")
    assert theirs.fsdp_config == config.fsdp_config


def test_file_that_accelerate_writes_loads(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    theirs = config_args.ClusterConfig(
        "LOCAL_MACHINE", "MULTI_GPU", "bf16", use_cpu=False, debug=True, num_processes=4, dynamo_config=None
    )
    path = tmp_path / "a.yaml"
    theirs.to_yaml_file(path)
    config = load_config(path)
    assert (config.distributed_type, config.num_processes, config.debug) == ("MULTI_GPU", 4, True)
    assert config.to_dict() == yaml.safe_load(path.read_text()) | {"downcast_bf16": "no"}


def test_default_file_is_accelerates_byte_for_byte(tmp_path: Path) -> None:
    utils = pytest.importorskip("accelerate.commands.config.default")
    path = tmp_path / "default_config.yaml"
    utils.write_basic_config("bf16", path)
    assert to_json(basic_config("bf16", "cpu", 0)) == path.read_text()


@pytest.mark.parametrize(
    ("kind", "devices", "expected"),
    [("cuda", 4, ("MULTI_GPU", 4, False)), ("cuda", 1, ("NO", 1, False)), ("xpu", 2, ("MULTI_XPU", 2, False))],
)
def test_default_file_has_a_process_for_each_device(kind: str, devices: int, expected: tuple[str, int, bool]) -> None:
    found = basic_config("no", kind, devices)
    assert (found["distributed_type"], found["num_processes"], found["use_cpu"]) == expected


OLD = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nfp16: true\nipex_config: {}  # mine\n"


def test_update_adds_what_accelerate_adds_and_keeps_the_old_file(tmp_path: Path) -> None:
    update = pytest.importorskip("accelerate.commands.config.update")
    path = written(tmp_path, OLD)
    theirs = written(tmp_path, OLD.partition("ipex")[0], "theirs.yaml")
    update.update_config(type("Arguments", (), {"config_file": str(theirs)}))
    changes = update_config(path, load_config(path))
    ours = yaml.safe_load(path.read_text())
    assert ours == yaml.safe_load(theirs.read_text()) | {"downcast_bf16": "no"}
    assert {"added mixed_precision", "removed fp16", "removed ipex_config", "added num_processes: 1"} <= set(changes)
    assert path.with_name("default_config.yaml.bak").read_text() == OLD
    assert update_config(path, load_config(path)) == [], "nothing is left to do"


def test_link_to_a_file_elsewhere_stays_a_link(tmp_path: Path) -> None:
    target = written(tmp_path, "debug: true\n", "target.yaml")
    target.chmod(0o600)
    link = tmp_path / "link.yaml"
    link.symlink_to(target)
    save_config(LaunchConfig(debug=False), link)
    assert link.is_symlink()
    assert load_config(target).debug is False
    assert target.stat().st_mode & 0o777 == 0o600


def test_unwritable_place_is_an_error(tmp_path: Path) -> None:
    written(tmp_path, "", "file")
    with pytest.raises(UserError, match=r"cannot write the configuration file .* --config-file"):
        save_config(LaunchConfig(), tmp_path / "file" / "a.yaml")


@pytest.mark.torch
def test_write_basic_config_writes_accelerates_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    theirs = pytest.importorskip("accelerate.utils")
    from hpcaccel.errors import RuntimeMisuse
    from hpcaccel.utils import write_basic_config
    from hpcaccel.utils.other import write_basic_config as under_its_module

    assert under_its_module is write_basic_config
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    path = write_basic_config("BF16")
    assert path == tmp_path / "hf/accelerate/default_config.yaml"
    assert theirs.write_basic_config("bf16", str(tmp_path / "theirs.json"))
    assert path.read_text() == (tmp_path / "theirs.json").read_text()
    assert write_basic_config("no") is False
    assert "already exists and is kept" in capsys.readouterr().out
    with pytest.raises(RuntimeMisuse, match="mixed_precision='int8' is not valid"):
        write_basic_config("int8", tmp_path / "new.yaml")
