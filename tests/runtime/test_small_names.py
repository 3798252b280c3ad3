"""Small functions and constants of Accelerate: scalers, autocast, TPUs, tracebacks, names and versions."""

from __future__ import annotations

import argparse
import operator
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.optimizer import move_to_device, patch_optimizer_step
from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.compat import tpu_setup
from hpcaccel.runtime.handlers import AutocastKwargs
from hpcaccel.runtime.launch_env import fsdp_plugin
from hpcaccel.runtime.states.accelerator_state import AcceleratorState
from hpcaccel.runtime.training.scaling import ShardedScaler
from hpcaccel.state import ThreadLocalSharedDict, do_nothing
from hpcaccel.utils import (
    CannotPadNestedTensorWarning,
    compare_versions,
    constants,
    get_grad_scaler,
    get_mixed_precision_context_manager,
    install_xla,
    is_torch_version,
    pad_across_processes,
    prepare_tpu,
)

pytestmark = pytest.mark.torch


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


# -- mixed precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "expected"), [("cpu", "cuda"), ("cuda", "cuda"), ("npu", "npu"), ("mps", "mps")])
def test_grad_scaler_is_that_of_the_machines_devices(monkeypatch: pytest.MonkeyPatch, kind: str, expected: str) -> None:
    monkeypatch.setattr("hpcaccel.runtime.distributed.device_backend.accelerator", lambda: kind)
    made: list[Any] = []
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **options: made.append((args, options)))
    get_grad_scaler(init_scale=8.0)
    assert made == [((expected,), {"init_scale": 8.0})]


def test_grad_scaler_of_fsdp_reduces_over_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcaccel.runtime.distributed.device_backend.accelerator", lambda: "cpu")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert isinstance(get_grad_scaler("FSDP"), ShardedScaler)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="CUDA is not available"):
        plain = get_grad_scaler("MULTI_GPU", growth_factor=3.0)  # type: ignore[arg-type]
    assert type(plain) is torch.amp.GradScaler
    assert not plain.is_enabled()


def test_grad_scaler_on_a_tpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcaccel.runtime.distributed.device_backend.accelerator", lambda: "xla")
    with pytest.raises(RuntimeMisuse, match="Use bf16"):
        get_grad_scaler()


def test_mixed_precision_context_needs_an_accelerator(fresh: None) -> None:
    with pytest.raises(RuntimeMisuse, match="create an Accelerator first"):
        get_mixed_precision_context_manager()


@pytest.mark.parametrize(("precision", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", None)])
@pytest.mark.filterwarnings("ignore:mixed_precision=fp16 on a CPU")
def test_mixed_precision_context_has_the_accelerators_precision(
    fresh: None, precision: str, expected: torch.dtype | None
) -> None:
    Accelerator(cpu=True, mixed_precision=precision)
    with get_mixed_precision_context_manager(native_amp=True):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is (expected or torch.bfloat16)
    with get_mixed_precision_context_manager(native_amp=True, autocast_kwargs=AutocastKwargs(enabled=False)):
        assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu"), get_mixed_precision_context_manager():
        assert torch.is_autocast_enabled("cpu"), "without native_amp an outer context stays as it is"


# -- states and optimizers --------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


def test_move_to_device_keeps_containers_and_other_values() -> None:
    moved = move_to_device({"a": [torch.ones(2), "text"], "b": Pair(torch.ones(1), None), "c": (3,)}, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].left.is_meta
    assert moved["c"] == (3,)


def test_patched_step_marks_the_optimizer_and_calls_the_method() -> None:
    optimizer = SimpleNamespace(_accelerate_step_called=False)
    step = patch_optimizer_step(optimizer, lambda *args, **kwargs: (args, kwargs))
    assert not optimizer._accelerate_step_called
    assert step(1, closure=2) == ((1,), {"closure": 2})
    assert optimizer._accelerate_step_called


def test_do_nothing_accepts_everything() -> None:
    assert do_nothing() is None  # type: ignore[func-returns-value]
    assert do_nothing(1, key=2) is None  # type: ignore[func-returns-value]


def test_shared_dict_is_one_for_class_and_instances_of_a_thread() -> None:
    class Shared:
        state = ThreadLocalSharedDict()

    first, second = Shared(), Shared()
    first.state["a"] = 1
    assert Shared.state is first.state is second.state
    elsewhere: list[dict[Any, Any]] = []
    thread = threading.Thread(target=lambda: elsewhere.append(Shared.state))
    thread.start()
    thread.join()
    assert elsewhere == [{}]
    second.state = {"b": 2}
    assert first.state == {"b": 2}


def test_nested_tensors_are_not_padded() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.warns(CannotPadNestedTensorWarning, match="unchanged"):
        assert pad_across_processes(nested) is nested
    assert issubclass(CannotPadNestedTensorWarning, UserWarning)


# -- TPUs -------------------------------------------------------------------------------------------------------------


def test_install_xla_needs_colab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("it has started a program"))
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    with pytest.raises(RuntimeMisuse, match="Google Colab only"):
        install_xla()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: "<InteractiveShell>"))
    with pytest.raises(RuntimeMisuse, match="Google Colab only"):
        install_xla(upgrade=True)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What pip gets, on Colab with torch 2.9.1."""
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        assert command[:4] == [sys.executable, "-m", "pip", "install"]
        commands.append(command[4:])
        return SimpleNamespace(returncode=int("-fails" in command[-1]))

    monkeypatch.setattr(subprocess, "run", run)
    shell = "<google.colab._shell.Shell object at 0x7f>"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"torch": "2.9.1+cpu"}[name])
    return commands


def test_install_xla_installs_the_wheel_in_torchs_version(installed: list[list[str]]) -> None:
    install_xla()
    assert installed == [["torch_xla[tpu]~=2.9.0", "--find-links", tpu_setup.LIBTPU]]
    install_xla(upgrade=True)
    assert installed[1] == ["--upgrade", "torch"]
    assert installed[2] == installed[0]


def test_failure_of_pip_is_an_error(installed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_setup, "LIBTPU", "-fails")
    with pytest.raises(RuntimeMisuse, match=r"pip install torch_xla\[tpu\]~=2\.9\.0 .* failed with code 1"):
        install_xla()


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("TPU", {}, {"XLA_USE_BF16": "1"}),
        ("TPU", {"downcast_bf16": True}, {"XLA_DOWNCAST_BF16": "1"}),
        ("CUDA", {}, {}),
        (None, {"debug": True}, {"ACCELERATE_DEBUG_MODE": "true"}),
        ("TPU", {"mixed_precision": "no"}, {}),
    ],
)
def test_prepare_tpu_adds_variables(
    monkeypatch: pytest.MonkeyPatch, device: str | None, options: dict[str, Any], expected: dict[str, str]
) -> None:
    runtime = ModuleType("torch_xla.runtime")
    runtime.device_type = lambda: device  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    monkeypatch.setattr(tpu_setup, "is_available", lambda name: device is not None)
    given = {"mixed_precision": "bf16", "downcast_bf16": False, "debug": False, "tpu_vm": ["a"], "tpu_name": "pod"}
    args, env = argparse.Namespace(**{**given, **options}), {"KEPT": "1"}
    assert prepare_tpu(args, env) == (args, {"KEPT": "1", **expected})
    assert not hasattr(args, "vm")
    prepare_tpu(args, env, pod=True)
    assert (args.vm, args.tpu) == (["a"], "pod")


# -- tracebacks by rich -----------------------------------------------------------------------------------------------

RICH = """
import sys
import hpcaccel, hpcaccel.utils
from hpcaccel import Accelerator
print(sys.excepthook is sys.__excepthook__)
from hpcaccel import rich
print(sys.excepthook is sys.__excepthook__)
from hpcaccel.utils import rich as of_utils
print(rich is of_utils is hpcaccel.rich, rich.install.__name__)
raise ValueError("an error")
"""


def test_rich_prints_tracebacks_once_it_is_imported() -> None:
    ended = subprocess.run([sys.executable, "-c", RICH], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["True", "False", "True", "install"]
    assert "ValueError: an error" in ended.stderr
    assert "\u256d" in ended.stderr, "the corner of rich's frame"


def test_missing_rich_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.traceback", None)
    monkeypatch.delitem(sys.modules, "hpcaccel.runtime.compat.rich_tracebacks", raising=False)
    monkeypatch.delitem(sys.modules, "hpcaccel.utils.rich", raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install rich"):
        exec("from hpcaccel import rich", {})


# -- constants --------------------------------------------------------------------------------------------------------


def test_versions_of_torch_are_below_the_one_that_hpcaccel_needs() -> None:
    names = [name for name in constants.__all__ if name.endswith("_PYTORCH_VERSION")]
    assert len(names) == 8
    for name in names:
        assert compare_versions(getattr(constants, name), "<=", "2.6.0"), name
        assert is_torch_version(">=", getattr(constants, name)), name


def test_operations_compare() -> None:
    functions = constants.STR_OPERATION_TO_FUNC
    assert functions[">="] is operator.ge
    assert [name for name, function in functions.items() if function(1, 2)] == ["!=", "<=", "<"]


def test_sharding_strategies_have_the_numbers_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(constants.FSDP_SHARDING_STRATEGY, 1):
        monkeypatch.setenv("FSDP_SHARDING_STRATEGY", str(number))
        plugin = fsdp_plugin(None, wanted=True)
        assert plugin is not None
        assert plugin.sharding_strategy == name
    for name in constants.FSDP_AUTO_WRAP_POLICY:
        monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", name)
        plugin = fsdp_plugin(None, wanted=True)
        assert plugin is not None
        assert plugin.auto_wrap_policy == name


@pytest.mark.parametrize("name", [name for name in constants.__all__ if name.isupper()])
def test_constant_has_accelerates_value(name: str) -> None:
    found = find_spec("accelerate")
    if found is None or found.origin is None:
        pytest.skip("accelerate is not installed")
    spec = spec_from_file_location("accelerates_constants", Path(found.origin).parent / "utils/constants.py")
    assert spec is not None
    assert spec.loader is not None
    theirs = module_from_spec(spec)  # without Accelerate itself, whose import takes seconds
    spec.loader.exec_module(theirs)
    in_any_order = sorted if name == "TORCH_LAUNCH_PARAMS" else lambda value: value
    assert in_any_order(getattr(constants, name)) == in_any_order(getattr(theirs, name))
