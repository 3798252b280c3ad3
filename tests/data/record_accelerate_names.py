"""Writes down the public names of Accelerate, and the parameters of its main classes, beside this file.

    python tests/data/record_accelerate_names.py        # in an environment that has accelerate

Names of functions and parameters only, so that tests can compare without having Accelerate.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import accelerate
import accelerate.test_utils
import accelerate.utils
import accelerate.utils.constants
import accelerate.utils.operations
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState

MODULES = (
    "accelerator", "big_modeling", "checkpointing", "data_loader", "hooks", "inference", "launchers", "local_sgd",
    "logging", "memory_utils", "optimizer", "parallelism_config", "scheduler", "state", "tracking",
)  # fmt: skip


def imported(page: Any) -> list[str]:
    """What the page imports from elsewhere, also if a package that it asks for is missing here."""
    nodes = [node for node in ast.walk(ast.parse(Path(page.__file__).read_text())) if isinstance(node, ast.ImportFrom)]
    return sorted({a.asname or a.name for node in nodes for a in node.names if not a.name.startswith("_")})


def defined(name: str) -> list[str]:
    module = importlib.import_module(f"accelerate.{name}")
    return sorted(
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__ and callable(value)
    )


def only_in_submodules() -> dict[str, list[str]]:
    """What scripts import from submodules because ``accelerate.utils`` does not have it: constants and exceptions; and
    the names of ``accelerate.test_utils`` except its own test programs."""
    constants, operations = accelerate.utils.constants, accelerate.utils.operations
    exported = set(imported(accelerate.utils))
    kinds = [name for name in defined("utils.operations") if inspect.isclass(getattr(operations, name))]
    raised = [name for name in kinds if issubclass(getattr(operations, name), Exception)]
    tools = accelerate.test_utils
    return {
        "accelerate.utils.constants": sorted(
            name for name in vars(constants) if name.isupper() and name not in exported
        ),
        "accelerate.test_utils": [name for name in imported(tools) if not inspect.ismodule(getattr(tools, name))],
        "accelerate.utils.operations": [name for name in raised if name not in exported],
    }


def parameters(function: Any) -> list[str]:
    # Decorators that hide what they wrap keep it in their closure.
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inner = [item for item in held if inspect.isfunction(item) and item.__name__ != "wrapper"]
    if list(inspect.signature(function).parameters) == ["args", "kwargs"] and inner:
        return parameters(inner[0])
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    marks: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [marks.get(item.kind, "") + item.name for item in found if item.name not in ("self", "cls")]


def members(instance: Any) -> dict[str, list[str] | None]:
    """Parameters of each public method; None for what is read."""
    found: dict[str, list[str] | None] = {"__init__": parameters(type(instance).__init__)}
    for kind in reversed(type(instance).__mro__):
        if not kind.__module__.startswith("accelerate"):
            continue
        for name, value in vars(kind).items():
            if not name.startswith("_"):
                function = getattr(value, "__func__", value)
                found[name] = parameters(function) if callable(function) else None
    for name in vars(instance):
        if not name.startswith("_"):
            found.setdefault(name, None)
    return dict(sorted(found.items()))


def main() -> None:
    import torch

    one = accelerate.Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(1))
    raw = torch.optim.SGD([weight], lr=0.1)
    optimizer = AcceleratedOptimizer(raw)
    scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.LambdaLR(raw, lambda step: 1.0), [optimizer])
    shown = [one, PartialState(), AcceleratorState(), GradientState(), optimizer, scheduler]
    record = {
        "version": accelerate.__version__,
        "accelerate": imported(accelerate),
        "accelerate.utils": imported(accelerate.utils),
        **{f"accelerate.{name}": defined(name) for name in MODULES},
        **only_in_submodules(),
        "members": {type(item).__name__: members(item) for item in shown},
    }
    version = ".".join(accelerate.__version__.split(".")[:2])
    path = Path(__file__).parent / f"accelerate-{version}-names.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
