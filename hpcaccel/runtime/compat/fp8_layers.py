"""fp8 layers of torchao and of TransformerEngine: converting a model by hand, and looking for them in a model.

``Accelerator(mixed_precision="fp8")`` converts prepared models to torchao's layers itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.compat.availability import is_available, require, torchao_required
from hpcaccel.runtime.deepspeed.engine_wrappers import GatheredParameters
from hpcaccel.runtime.handlers import AORecipeKwargs
from hpcaccel.runtime.parallel.forward_wrappers import ForwardWrapper, put_around, take_off
from hpcaccel.runtime.parallel.precision import (
    convert_to_fp8,
    filter_linear_layers,
    find_first_last_linear_layers,
)

__all__ = [
    "apply_fp8_autowrap",
    "contextual_fp8_autocast",
    "convert_model",
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "has_ao_layers",
    "has_transformer_engine_layers",
]

FORMATS = ("HYBRID", "E4M3", "E5M2")
"""Formats of TransformerEngine's recipes. HYBRID: E4M3 in the forward pass, E5M2 in the backward pass."""


# -- torchao


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Whether the layer ``fqn`` of the model ``module`` may compute in fp8: it is neither the first nor the last linear
    layer. Given a layer itself, only its sizes are checked."""
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Whether the model has fp8 linear layers of torchao.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[..., bool] | None = None
) -> None:
    """Replace linear layers with torchao's fp8 layers, in place.

    Args:
        config: a ``Float8LinearConfig`` of torchao.
        module_filter_func: called with each linear layer and its name; returns whether it is converted. Default: all
            but the first and the last, and those whose sizes are not multiples of 16.

    Raises:
        ImportError: torchao is not installed.
    """
    convert_to_fp8(model, AORecipeKwargs(config=config, module_filter_func=module_filter_func))


# -- TransformerEngine


def _engine(user: str, part: str = "pytorch") -> Any:
    """A module of TransformerEngine, or of Intel's package for HPUs.

    Args:
        user: the function that needs it, for the error message.
        part: ``pytorch``, or ``recipe``.

    Raises:
        ImportError: it is not installed.
    """
    if is_available("hpu"):
        require("intel_transformer_engine", user)
        return import_module("intel_transformer_engine" + (".recipe" if part == "recipe" else ""))
    require("transformer_engine", user, install="'transformer_engine[pytorch]'")
    return import_module("transformer_engine." + ("common.recipe" if part == "recipe" else part))


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace linear and layer norm layers with TransformerEngine's, or these with torch's, in place. The weights are
    copied. Linear layers whose sizes are not multiples of 16 are left as they are.

    Args:
        to_transformer_engine: whether to convert to TransformerEngine's layers; if not, back to torch's.

    Raises:
        ImportError: TransformerEngine is not installed.
    """
    engine = _engine("convert_model()")
    # The package for HPUs has no layer norm.
    norm, source = getattr(engine, "LayerNorm", None), nn if to_transformer_engine else engine
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            made: Any = None
            if _convert_linear and isinstance(module, source.Linear):
                made = _linear(module, engine.Linear if to_transformer_engine else nn.Linear)
            elif _convert_ln and norm is not None and isinstance(module, source.LayerNorm):
                made = _norm(module, norm if to_transformer_engine else nn.LayerNorm)
            if made is not None:
                _copy(module, made)
                setattr(parent, name, made.to(module.weight.device).train(module.training))


def _linear(module: Any, kind: Any) -> Any:
    if kind is not nn.Linear and any(size % 16 for size in (module.in_features, module.out_features)):
        return None
    bias = module.bias is not None and module.bias.numel() > 0  # TransformerEngine has an empty one for none
    dtype = {"dtype" if kind is nn.Linear else "params_dtype": module.weight.dtype}
    return kind(module.in_features, module.out_features, bias=bias, **dtype)


def _norm(module: Any, kind: Any) -> Any:
    dtype = {"dtype" if kind is nn.LayerNorm else "params_dtype": module.weight.dtype}
    return kind(module.weight.shape[0], eps=module.eps, **dtype)


@torch.no_grad()
def _copy(source: Any, target: Any) -> None:
    held = [one for one in (source.weight, source.bias) if one is not None]
    with GatheredParameters(held, modifier_rank=0):
        target.weight.copy_(source.weight)
        if source.bias is not None and source.bias.numel():
            target.bias.copy_(source.bias)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether the model has layers of TransformerEngine.

    Raises:
        ImportError: TransformerEngine is not installed.
    """
    engine = _engine("has_transformer_engine_layers()")
    names = ("Linear", "LayerNorm", "TransformerLayer")
    kinds = tuple(kind for name in names if (kind := getattr(engine, name, None)) is not None)
    return any(isinstance(module, kinds) for module in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """A function for a model's class: it takes the model and the arguments of its ``forward``, and calls
    ``model_forward`` with them under TransformerEngine's fp8 autocast.

    Args:
        model_forward: the model's ``forward``, bound to it.
        fp8_recipe: a recipe of TransformerEngine.
        use_during_eval: whether fp8 is used in evaluation mode, too.

    Raises:
        ImportError: TransformerEngine is not installed.
    """
    engine = _engine("contextual_fp8_autocast()")

    @wraps(model_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        enabled = use_during_eval or self.training
        with engine.fp8_autocast(enabled=enabled, fp8_recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    return forward


class Fp8Forward(ForwardWrapper):
    """A model's forward under TransformerEngine's fp8 autocast."""

    def __init__(self, inner: Callable[..., Any], model: nn.Module, recipe: Any, *, use_during_eval: bool) -> None:
        super().__init__(inner)
        self.model = model
        self.recipe = recipe
        self.use_during_eval = use_during_eval

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = contextual_fp8_autocast(self.inner, self.recipe, self.use_during_eval)
        return forward(self.model, *args, **kwargs)


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """Let a model's ``forward`` run under TransformerEngine's fp8 autocast; outside training, only if the recipe has
    ``use_autocast_during_eval``.

    Args:
        fp8_recipe_handler: a ``TERecipeKwargs``, or None for TransformerEngine's defaults.

    Returns:
        The same model.

    Raises:
        ImportError: TransformerEngine is not installed.
        RuntimeMisuse: the recipe has an unknown format, or fields that conflict; the device has no MXFP8.
    """
    recipes = _engine("apply_fp8_autowrap()", "recipe")
    options = {} if fp8_recipe_handler is None else fp8_recipe_handler.to_kwargs()
    for name in ("backend", "opt_level"):  # fields of FP8RecipeKwargs for other libraries
        options.pop(name, None)
    during_eval = bool(options.pop("use_autocast_during_eval", False))
    blocks = bool(options.pop("use_mxfp8_block_scaling", False))
    if "fp8_format" in options:
        options["fp8_format"] = _format(recipes, options["fp8_format"])
    recipe = _block_recipe(recipes, options) if blocks else recipes.DelayedScaling(**options)
    take_off(model, Fp8Forward)
    put_around(model, lambda inner: Fp8Forward(inner, model, recipe, use_during_eval=during_eval))
    return model


def _format(recipes: Any, name: str) -> Any:
    if str(name).upper() not in FORMATS:
        raise RuntimeMisuse(f"fp8_format={name!r}: use one of {', '.join(FORMATS)}")
    return getattr(recipes.Format, str(name).upper())


def _block_recipe(recipes: Any, options: dict[str, Any]) -> Any:
    wrong = [name for name in ("amax_compute_algo", "amax_history_len") if name in options]
    if wrong:
        raise RuntimeMisuse(f"use_mxfp8_block_scaling=True cannot be combined with {' and '.join(wrong)}")
    if is_available("hpu"):
        raise RuntimeMisuse("use_mxfp8_block_scaling=True: HPUs have no MXFP8")
    available, reason = _engine("apply_fp8_autowrap()", "pytorch.fp8").check_mxfp8_support()
    if not available:
        raise RuntimeMisuse(f"use_mxfp8_block_scaling=True: this device has no MXFP8: {reason}")
    return recipes.MXFP8BlockScaling(**options)
