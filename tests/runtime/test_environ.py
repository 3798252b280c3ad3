"""Environment variables, introspection of objects, ports and the kernel version."""

from __future__ import annotations

import logging
import os
import platform
import socket
from pathlib import Path

import pytest

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import launch_env
from hpcaccel.runtime.compat import availability, introspection

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("word", ["y", "Yes", "t", "TRUE", "on", "1"])
def test_str_to_bool_accepts_words_for_true(word: str) -> None:
    assert launch_env.str_to_bool(word) == 1
    assert launch_env.str_to_bool(word, to_bool=True) is True


@pytest.mark.parametrize("word", ["n", "No", "f", "FALSE", "off", "0"])
def test_str_to_bool_accepts_words_for_false(word: str) -> None:
    assert launch_env.str_to_bool(word) == 0
    assert launch_env.str_to_bool(word, to_bool=True) is False


def test_str_to_bool_rejects_other_words() -> None:
    with pytest.raises(RuntimeMisuse, match="'maybe' is not a boolean"):
        launch_env.str_to_bool("maybe")


def test_patch_and_clear_environment_restore_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THERE", "before")
    with launch_env.patch_environment(there="now", new=3):
        assert (os.environ["THERE"], os.environ["NEW"]) == ("now", "3")
    assert os.environ["THERE"] == "before"
    assert "NEW" not in os.environ
    with launch_env.clear_environment():
        assert dict(os.environ) == {}
        os.environ["NEW"] = "x"
    assert os.environ["THERE"] == "before"
    assert "NEW" not in os.environ


def test_variables_are_read_as_int_flag_or_choice_with_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBER", "4")
    monkeypatch.setenv("FLAG", "yes")
    monkeypatch.delenv("MISSING", raising=False)
    assert launch_env.get_int_from_env(["MISSING", "NUMBER"], 1) == 4
    assert launch_env.get_int_from_env(["MISSING"], 1) == 1
    assert launch_env.parse_flag_from_env("FLAG") is True
    assert launch_env.parse_flag_from_env("MISSING") is False
    assert launch_env.parse_choice_from_env("MISSING", "no") == "no"


def test_environment_file_omits_unrepresentable_values_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert launch_env.convert_dict_to_env_variables({"A": "1", "B": "x y", "C": ""}) == ["A=1\n"]
    assert [record.args for record in caplog.records] == [("B", "x y"), ("C", "")]


def test_introspection_of_attributes_dicts_names_and_libraries() -> None:
    assert introspection.recursive_getattr(Path("a/b"), "parent.name") == "a"
    assert introspection.merge_dicts({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}}) == {"a": {"b": 1, "d": 3}, "c": 2}
    assert introspection.get_pretty_name(Path) == "Path"
    assert introspection.get_pretty_name(Path("x")) in ("PosixPath", "Path")
    assert availability.are_libraries_initialized("torch", "nonsense") == ["torch"]


def test_is_port_in_use_detects_a_listening_socket() -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert availability.is_port_in_use(port)
    assert not availability.is_port_in_use(port)


@pytest.mark.parametrize(("release", "warns"), [("5.4.0-42-generic", True), ("4.18.0", True), ("5.15.0", False)])
def test_check_os_kernel_warns_about_old_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: str, warns: bool
) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    with caplog.at_level(logging.WARNING):
        availability.check_os_kernel()
    assert (release in caplog.text) == warns


def test_compiling_and_the_mesh_may_come_from_the_launcher() -> None:
    assert launch_env.dynamo_plugin({}) is None
    assert launch_env.dynamo_plugin({"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default"}) is None
    found = launch_env.dynamo_plugin(
        {
            "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
            "ACCELERATE_DYNAMO_MODE": "default",
            "ACCELERATE_DYNAMO_USE_DYNAMIC": "false",
        }
    )
    assert found is not None
    assert (found.backend, found.mode, found.dynamic, found.fullgraph) == ("inductor", "default", False, None)
    sizes = {"PARALLELISM_CONFIG_TP_SIZE": "2", "PARALLELISM_CONFIG_CP_SIZE": "1"}
    assert launch_env.parallelism_config(sizes) is None
    mesh = launch_env.parallelism_config({**sizes, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"})
    assert mesh is not None
    assert (mesh.tp_size, mesh.cp_size, mesh.dp_shard_size) == (2, 1, None)
    both = {"PARALLELISM_CONFIG_CP_SIZE": "8", "PARALLELISM_CONFIG_SP_SIZE": "8"}
    with pytest.raises(RuntimeMisuse, match="cp_size=8, sp_size=8"):
        launch_env.parallelism_config({**both, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"})
    with pytest.raises(RuntimeMisuse, match="ACCELERATE_DYNAMO_USE_DYNAMIC='maybe' is not a boolean"):
        launch_env.dynamo_plugin({"ACCELERATE_DYNAMO_BACKEND": "EAGER", "ACCELERATE_DYNAMO_USE_DYNAMIC": "maybe"})
