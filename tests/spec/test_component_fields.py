"""The section ``components``: programs that run beside the ranks, on their own nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec import from_json, load_spec, spec_from_values, to_json, to_yaml
from hpcaccel.spec.sweep.sweep_file import load_sweep

SLURM = {"partition": "gpu", "account": "ml", "nodes": 2, "gpus_per_node": 4, "time": 60}


def with_data(**own: Any) -> dict[str, Any]:
    data = {"entrypoint": {"command": ["serve"]}, **own}
    return {"name": "gpt", "entrypoint": {"command": ["train"]}, "slurm": SLURM, "components": {"data": data}}


def test_component_adds_its_nodes_and_inherits_account_and_time() -> None:
    spec = spec_from_values(with_data(slurm={"partition": "cpu", "nodes": 3, "gpus_per_node": 1}))
    assert (spec.total_nodes, spec.total_gpus) == (5, 11)
    assert spec.of_component("data").slurm.flags() == [
        ("account", "ml"),
        ("partition", "cpu"),
        ("nodes", "3"),
        ("ntasks-per-node", "1"),
        ("gpus-per-node", "1"),
        ("time", "01:00:00"),
    ]


def test_component_survives_yaml_and_json_round_trips(tmp_path: Path) -> None:
    spec = spec_from_values(with_data(slurm={"partition": "cpu", "mem": "9G"}))
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(spec))
    assert "nodelist" not in path.read_text(), "what asks for nothing is left out"
    assert load_spec(path) == spec == from_json(to_json(spec))


def test_component_setting_can_be_overridden_on_the_command_line(tmp_path: Path) -> None:
    spec = spec_from_values(with_data(), overrides=["components.data.slurm.nodes=4"])
    assert spec.components["data"].slurm.nodes == "4"


def test_component_script_is_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    text = "name: x\nentrypoint: {command: [train]}\ncomponents: {data: {entrypoint: {script: serve.py}}}\n"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"job.yaml:3: components.data.entrypoint.script .*serve.py' is not a file"):
        load_spec(path)
    (tmp_path / "serve.py").touch()
    assert load_spec(path).components["data"].entrypoint.script == str(tmp_path / "serve.py")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (with_data(slurm={"time": 5}), "components.data.slurm.time applies to the whole job: set slurm.time"),
        (
            with_data(slurm={"extra": {"comment": "x"}}),
            "slurm.extra.comment applies to the whole job: set slurm.comment",
        ),
        (with_data(slurm={"nodes": "1-2"}), "slurm.nodes 1-2 is not a single number"),
        (
            with_data(entrypoint={"function": "f"}),
            "components.data.entrypoint must have one of script, module, command",
        ),
        (with_data(entrypoint={}), "components.data.entrypoint must have one of script, module, command"),
        (with_data(resilience={}), "components.data.resilience is not a known key"),
        ({**with_data(), "components": {"Data": {}}}, "components.Data 'Data' is not a valid component name"),
        ({**with_data(), "components": {"all": {}}}, "components.all 'all' is not a valid component name"),
        ({**with_data(), "resilience": {"chain": 3}}, "resilience.chain cannot be combined with components"),
    ],
)
def test_invalid_component_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec_from_values(values)


def test_sweep_with_components_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "name: x\nentrypoint: {command: [train]}\ncomponents: {data: {entrypoint: {command: [serve]}}}\n"
        "sweep: {metric: loss, mode: min, max_trials: 2, parameters: {args.lr: {float: [0.1, 1]}}}\n"
    )
    with pytest.raises(SpecError, match=r"sweep.yaml:3: components cannot be combined with sweep: its workers"):
        load_sweep(path)
