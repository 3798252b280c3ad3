"""Accelerate's configuration file and memory estimate, as its own modules give them to scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcaccel.commands.config import default_config_file, load_config_from_file
from hpcaccel.commands.config.config_args import ClusterConfig
from hpcaccel.commands.config.default import write_basic_config
from hpcaccel.commands.estimate import (
    check_has_model,
    create_empty_model,
    estimate_command,
    estimate_command_parser,
    estimate_training_usage,
    gather_data,
)
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.launch.launch_config import KEY_KINDS, load_config
from hpcaccel.utils import ComputeEnvironment, DistributedType

pytestmark = pytest.mark.torch

TEXT = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: no
num_processes: 4
fsdp_config:
  fsdp_version: 2
downcast_bf16: 'no'
"""


def test_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(TEXT)
    found = load_config_from_file(str(path))
    assert (found.compute_environment, found.distributed_type) == (
        ComputeEnvironment.LOCAL_MACHINE,
        DistributedType.FSDP,
    )
    assert (found.mixed_precision, found.num_processes, found.fsdp_config) == ("no", 4, {"fsdp_version": 2})
    assert (found.use_cpu, found.debug, found.rdzv_backend, found.deepspeed_config) == (False, False, "static", {})
    values = found.to_dict()
    assert (values["distributed_type"], type(values["distributed_type"])) == ("FSDP", str)
    assert "deepspeed_config" not in values
    assert "gpu_ids" not in values


@pytest.mark.parametrize("name", ["new.yaml", "new.json"])
def test_written_file_is_one_that_the_launcher_reads(tmp_path: Path, name: str) -> None:
    made = ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=DistributedType.MULTI_GPU,
        mixed_precision="bf16",
        use_cpu=False,
        debug=True,
        num_processes=8,
        main_process_port=29501,
        dynamo_config=None,
    )
    path = tmp_path / name
    (made.to_json_file if name.endswith("json") else made.to_yaml_file)(path)
    assert load_config_from_file(str(path)) == made
    read = load_config(path)
    assert (read.distributed_type, read.num_processes, read.main_process_port) == ("MULTI_GPU", 8, 29501)


def test_keys_are_those_of_the_launcher() -> None:
    assert set(ClusterConfig.__dataclass_fields__) == set(KEY_KINDS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("distributed_type: NO", {"distributed_type": "NO", "num_processes": 1, "mixed_precision": None}),
        ("distributed_type: 'NO'\nfp16: true", {"mixed_precision": "fp16"}),
        ("distributed_type: 'NO'\ndynamo_backend: INDUCTOR", {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}),
        ("distributed_type: 'NO'\ndynamo_backend: no", {"dynamo_config": {}}),
        ('{"distributed_type": "MULTI_CPU", "num_processes": 2}', {"num_processes": 2}),
    ],
)
def test_older_files_and_unquoted_no(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    found = ClusterConfig.from_yaml_file(path)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_processes: 2", "has no distributed_type"),
        ("distributed_type: 'NO'\nnum_procesess: 2", "unknown keys: num_procesess"),
        ("distributed_type: 'NO'\ncompute_environment: AMAZON_SAGEMAKER", "SageMaker"),
        ("distributed_type: FOO", r"own.yaml: distributed_type 'FOO' is not valid \(allowed: .*MULTI_GPU"),
        ("distributed_type: 'NO'\ncompute_environment: X", "compute_environment 'X' is not valid"),
        ("distributed_type: [", "own.yaml is not valid YAML: "),
    ],
)
def test_wrong_file_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(RuntimeMisuse, match=said):
        load_config_from_file(str(path))
    with pytest.raises(RuntimeMisuse, match="No such file"):
        load_config_from_file(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(("content", "said"), [(b"{", "own.json is not valid JSON"), (b"\xff", "own.json: .*decode")])
def test_damaged_file_is_an_error(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "own.json"
    path.write_bytes(content)
    with pytest.raises(RuntimeMisuse, match=said):
        load_config_from_file(str(path))


def test_default_file_is_in_accelerates_folder(tmp_path: Path) -> None:
    assert default_config_file.endswith("accelerate/default_config.yaml")
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "default_config.json").write_text('{"distributed_type": "NO"}')
    code = """
        import os, hpcaccel.commands.config as config
        found = config.load_config_from_file(config.default_config_file)
        print(config.default_config_file, found.num_processes)
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.split() == [str(folder / "default_config.json"), "1"]


def test_basic_file_can_be_loaded(tmp_path: Path) -> None:
    path = write_basic_config("bf16", tmp_path / "basic.json")
    assert path
    assert load_config_from_file(str(path)).mixed_precision == "bf16"


# -- the memory estimate -----------------------------------------------------------------------------------------------

BERT = {
    "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 16, "intermediate_size": 32,
    "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 100, "max_position_embeddings": 8,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    return str(tmp_path)


def test_model_has_no_weights(model: str) -> None:
    for library in ("transformers", None):
        made = create_empty_model(model, library)
        assert {(one.device.type, one.dtype) for one in made.parameters()} == {("meta", torch.float32)}
    with pytest.raises(ValueError, match="library_name='keras'"):
        create_empty_model(model, "keras")


def test_sizes_by_type(model: str) -> None:
    args = estimate_command_parser().parse_args([model, "--dtypes", "float32", "int8"])
    rows = gather_data(args)
    count = sum(one.numel() for one in create_empty_model(model).parameters())
    assert [row[0] for row in rows] == ["float32", "int8"]
    assert count * 4 <= rows[0][2] <= count * 4 + 1024  # with its buffers
    assert rows[1][2] == rows[0][2] / 4
    assert 0 < rows[0][1] < rows[0][2]
    assert rows[0][3]["step"] == int(rows[0][2]) * 4
    assert set(rows[1][3].values()) == {-1}


def test_training_usage() -> None:
    assert estimate_training_usage(100, "float32") == {"model": 100, "optimizer": 200, "gradients": 100, "step": 400}
    assert estimate_training_usage(100, "bfloat16") == {"model": 100, "optimizer": 200, "gradients": 150, "step": 200}
    assert estimate_training_usage(100, "fp8") == estimate_training_usage(100, "float16")
    assert set(estimate_training_usage(100, "int4").values()) == {-1}


def test_table_of_sizes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    estimate_command(
        Namespace(model_name=model, library_name=None, trust_remote_code=False, dtypes=["float32", "int8"])
    )
    title, heads, first, second = capsys.readouterr().out.splitlines()
    assert title == f"Memory of {model}"
    assert heads.split("  ")[0] == "dtype"
    assert "KB" in first
    assert second.endswith("-")


def test_library_of_a_missing_model(model: str) -> None:
    (Path(model) / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="pass library_name"):
        create_empty_model(model)
    with pytest.raises((OSError, ValueError)) as raised:
        create_empty_model(model, "transformers")
    assert check_has_model(raised.value) == "transformers"
    assert check_has_model(RuntimeError("Unknown model (x)")) == "timm"
    assert check_has_model(KeyError("x")) == "unknown"
