"""Program that builds a model on torch's meta device, which allocates no memory, and prints its tensors as JSON.

Usage: ``python -c TEXT factory MODULE:FUNCTION`` or ``python -c TEXT config FILE`` in the ranks' own Python, which may
not have hpcaccel. ``model_size`` passes the text of this file; nothing imports it. The line has ``tensors`` (lists of
name, shape, dtype, kind; the kind is ``trained``, ``frozen`` or ``buffer``), ``config`` (the model's configuration, or
null) and ``class``. A tensor with several names is listed once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import Any

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def fail(message: str) -> None:
    """Exit with a message, which becomes the error message of the command."""
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(1)


def from_factory(place: str) -> Any:
    """The model, or models, that ``module:function`` returns."""
    module_name, _, function_name = place.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function: Any = importlib.import_module(module_name)
        for name in function_name.split("."):
            function = getattr(function, name)
    except Exception as error:
        fail(f"{place} cannot be imported: {type(error).__name__}: {error}")
    import torch

    try:
        with torch.device("meta"), contextlib.redirect_stdout(sys.stderr):
            return function()
    except Exception as error:
        fail(
            f"{place}() failed on the meta device: {type(error).__name__}: {error}. The function must build the model "
            "without arguments and without reading the values of tensors"
        )


def from_config(path: str) -> Any:
    """The transformers model that a ``config.json`` describes."""
    os.environ.update(OFFLINE)
    import torch

    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        fail(f"{path} needs the package transformers: {error}")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        names = list(getattr(config, "architectures", None) or [])
        named = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
        with torch.device("meta"), contextlib.redirect_stdout(sys.stderr):
            if named is not None:
                return named(config)
            try:
                return transformers.AutoModelForCausalLM.from_config(config)
            except ValueError:  # a configuration of another kind of model
                return transformers.AutoModel.from_config(config)
    except Exception as error:
        fail(f"transformers cannot build the model of {path}: {type(error).__name__}: {error}")


def described(built: Any, place: str) -> dict[str, Any]:
    """The output for a model, or for several in a list, tuple or dict."""
    from torch import nn

    values = list(built.values()) if isinstance(built, dict) else built
    models = [one for one in (values if isinstance(values, list | tuple) else [values]) if isinstance(one, nn.Module)]
    if not models:
        fail(f"{place} returned {type(built).__name__}, not a torch.nn.Module")
    tensors = []
    seen: set[int] = set()
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        kinds = [(model.named_parameters(), ""), (model.named_buffers(), "buffer")]
        for items, kind in kinds:
            for name, tensor in items:
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                found = kind or ("trained" if tensor.requires_grad else "frozen")
                tensors.append([prefix + name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), found])
    return {"tensors": tensors, "config": _config(models[0]), "class": type(models[0]).__name__}


def _config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", None)
    if not isinstance(values, dict):
        return None
    return json.loads(json.dumps(values, default=str))


if __name__ == "__main__":
    kind, where = sys.argv[1:3]
    model = from_factory(where) if kind == "factory" else from_config(where)
    os.write(1, b"\n" + json.dumps(described(model, where)).encode() + b"\n")
