"""The public interface: `hpcaccel` exports exactly the listed names."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpcaccel

ROOT = Path(__file__).resolve().parent.parent

LOGIN = {"Client", "HpcaccelError", "JobSpec", "Run", "Sweep", "find_run", "load_spec", "submit", "sweep"}
NAMES = """
    AORecipeKwargs Accelerator AcceleratorState AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration
    DeepSpeedPlugin DistributedDataParallelKwargs DistributedType DynamoBackend FP8RecipeKwargs
    FullyShardedDataParallelPlugin GeneralTracker GradScalerKwargs GradientAccumulationPlugin GradientState
    InitProcessGroupKwargs LocalSGD LoggerType MSAMPRecipeKwargs ParallelismConfig PartialState PermutationSampler
    PrecisionType ProfileKwargs ProjectConfiguration RNGType ResultsFile TERecipeKwargs TorchDynamoPlugin
    TorchTensorParallelConfig TorchTensorParallelPlugin broadcast broadcast_object_list cpu_offload
    cpu_offload_with_hook debug_launcher disk_offload dispatch_model find_executable_batch_size gather gather_object
    get_logger infer_auto_device_map init_empty_weights init_on_device is_initialized is_rich_available
    load_checkpoint_and_dispatch load_checkpoint_in_model load_sharded notebook_launcher pad_across_processes
    prepare_pippy reduce set_seed skip_first_batches synchronize_rng_states wait_for_everyone
"""
ANYWHERE = {"StopGate", "log", "should_stop", "stop_gate"}
"""For programs with or without torch."""
RANKS = set(NAMES.split())


def test_exported_names_are_exactly_the_listed_ones() -> None:
    assert set(hpcaccel.__all__) == LOGIN | ANYWHERE | RANKS
    assert set(dir(hpcaccel)) >= LOGIN | ANYWHERE | RANKS | set(hpcaccel._PAGES)


@pytest.mark.parametrize("name", sorted(LOGIN | ANYWHERE))
def test_each_name_that_needs_no_torch_can_be_imported(name: str) -> None:
    assert callable(getattr(hpcaccel, name))


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(RANKS))
def test_each_name_of_a_training_script_can_be_imported(name: str) -> None:
    assert callable(getattr(hpcaccel, name))


@pytest.mark.torch
@pytest.mark.parametrize("page", hpcaccel._PAGES)
def test_accelerate_import_path_has_every_name_of_its_all(page: str) -> None:
    module = getattr(hpcaccel, page)
    assert module.__name__ == f"hpcaccel.{page}"
    for name in getattr(module, "__all__", []):
        assert getattr(module, name) is not None


@pytest.mark.torch
def test_unsupported_accelerate_name_is_refused_with_the_reason() -> None:
    for page in ("hpcaccel.utils", "hpcaccel.utils.dataclasses"):
        with pytest.raises(ImportError, match=r"has no MegatronLMPlugin\. Megatron-LM is not supported: .*fsdp"):
            exec(f"from {page} import MegatronLMPlugin")


def test_module_of_the_base_can_be_imported_without_the_runtime(tmp_path: Path) -> None:
    """As in a run directory's node.pyz, which contains only the base and ``node``."""
    package = tmp_path / "hpcaccel"
    package.mkdir()
    for name in ("__init__.py", "errors.py"):
        (package / name).write_text((ROOT / "hpcaccel" / name).read_text())
    done = subprocess.run(
        [sys.executable, "-c", "from hpcaccel import errors; print(errors.__file__)"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == str(package / "errors.py"), done.stderr


@pytest.mark.torch
def test_utils_tqdm_is_the_function_and_not_the_module() -> None:
    from hpcaccel import utils
    from hpcaccel.utils.tqdm import tqdm

    assert utils.tqdm is tqdm


def test_type_checkers_see_the_same_names_as_python() -> None:
    """They read the imports under TYPE_CHECKING, Python reads the table."""
    tree = ast.parse((ROOT / "hpcaccel" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == hpcaccel._HOME


def test_unknown_name_raises_attribute_error() -> None:
    name = "Acelerator"
    with pytest.raises(AttributeError, match="has no attribute 'Acelerator'"):
        getattr(hpcaccel, name)


@pytest.mark.parametrize("module", ["state", "utils", "tracking"])
def test_missing_name_of_an_import_path_does_not_blame_the_package(module: str) -> None:
    with pytest.raises(AttributeError, match=r"^hpcaccel has no 'Run' under this import path$"):
        getattr(importlib.import_module(f"hpcaccel.{module}"), "Run")  # noqa: B009


def interpreter(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_without_torch_names_the_extra_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    done = interpreter("-c", "from hpcaccel import Accelerator", folder=tmp_path)
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: hpcaccel.Accelerator needs torch, which is not installed for {sys.executable}: "
        "pip install 'hpcaccel[train]'"
    )


def test_import_error_of_a_broken_torch_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import a_library_of_torchs_own\n")
    done = interpreter("-c", "from hpcaccel import Accelerator", folder=tmp_path)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'a_library_of_torchs_own'"


def test_package_runs_as_a_program(tmp_path: Path) -> None:
    done = interpreter("-m", "hpcaccel", "--version", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"hpcaccel {hpcaccel.__version__}\n")


@pytest.mark.torch
def test_on_main_process_decorates_before_an_accelerator_exists(tmp_path: Path) -> None:
    code = "from hpcaccel import Accelerator; print(Accelerator.on_main_process(lambda: 42)())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "42\n", done.stderr
