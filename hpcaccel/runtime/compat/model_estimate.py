"""Accelerate's estimate of a model's memory from its configuration, in scripts. ``hpcaccel estimate-memory`` estimates
more: activations, strategies, and the GPUs of a cluster."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = [
    "check_has_model",
    "create_empty_model",
    "estimate_command",
    "estimate_command_parser",
    "estimate_training_usage",
    "gather_data",
]

_PARTS = {"float32": 1, "float16": 2, "int8": 4, "int4": 8}
"""By type: how many of its values take the bytes of one in float32."""


def create_empty_model(
    model_name: str, library_name: str | None = None, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """A model without weights, on the meta device, in float32.

    Args:
        model_name: a name on the Hugging Face Hub, or a folder with a ``config.json``.
        library_name: ``transformers`` or ``timm``; None: detected from the configuration.
        trust_remote_code: whether to run code that comes with the model.
        access_token: token for the Hub, for private models.

    Raises:
        ImportError: the library is not installed.
        ValueError: the library is another one, or neither library supports the configuration.
        OSError: there is no such model (raised by the library).
    """
    from hpcaccel.runtime.parallel.meta_device import init_empty_weights

    library = _library(model_name, access_token) if library_name is None else library_name
    if library == "timm":
        import timm  # type: ignore[import-not-found, unused-ignore]

        on_hub = "/" in model_name and ":" not in model_name
        with init_empty_weights():
            return timm.create_model(f"hf-hub:{model_name}" if on_hub else model_name, pretrained=False)
    if library != "transformers":
        raise ValueError(f"library_name={library!r} is not valid (allowed: transformers, timm)")
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(
        model_name, trust_remote_code=trust_remote_code, token=access_token
    )
    own = [kind for kind in getattr(config, "auto_map", None) or () if kind.startswith("AutoModelFor")]
    kind = getattr(transformers, own[0]) if own else transformers.AutoModel
    with init_empty_weights():
        return kind.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)


def _library(model_name: str, access_token: str | None) -> str:
    import transformers

    config, _ = transformers.PretrainedConfig.get_config_dict(model_name, token=access_token)
    found = next((library for key, library in (("model_type", "transformers"), ("architecture", "timm"))
                  if key in config), None)  # fmt: skip
    if found is None:
        raise ValueError(f"the configuration of {model_name!r} names neither library: pass library_name")
    return found


def check_has_model(error: Exception) -> str:
    """The library that did not find a model, by its error: ``timm``, ``transformers``, or ``unknown``."""
    text = str(error)
    if isinstance(error, RuntimeError) and "Unknown model" in text:
        return "timm"
    not_found = "does not appear to have a file named" in text or "Unrecognized model in" in text
    return "transformers" if isinstance(error, OSError | ValueError) and not_found else "unknown"


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, float]:
    """Bytes that training with Adam takes, without activations: ``model``, ``gradients``, ``optimizer``, and the peak
    in a ``step``; -1 if the model cannot be trained in this type.

    Args:
        bytes: size of the model in float32.
        mixed_precision: ``float32``, ``float16``, ``bfloat16`` or ``fp8``, which without MS-AMP keeps float32 weights.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    if mixed_precision in ("float16", "bfloat16") or (mixed_precision == "fp8" and msamp_config is None):
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes + bytes // 2, "step": bytes * 2}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """For each type in ``args.dtypes``: its name, the bytes of the largest layer, those of the model, and the result of
    ``estimate_training_usage``.

    Args:
        args: from ``estimate_command_parser``.

    Raises:
        ImportError, ValueError, OSError: see ``create_empty_model``.
    """
    from hpcaccel.runtime.compat.introspection import calculate_maximum_sizes

    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    total, (largest, _) = calculate_maximum_sizes(model)
    return [
        [dtype, largest / _PARTS[dtype], total / _PARTS[dtype], estimate_training_usage(int(total), dtype)]
        for dtype in args.dtypes
    ]


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser for ``estimate_command``; ``subparsers`` is the result of another parser's ``add_subparsers``."""
    text = "The memory that a model takes, by type."
    parser: argparse.ArgumentParser = (
        argparse.ArgumentParser(description=text)
        if subparsers is None
        else subparsers.add_parser("estimate-memory", description=text)
    )
    parser.add_argument("model_name", help="Name on the Hugging Face Hub, or folder with a config.json.")
    parser.add_argument("--library_name", choices=("timm", "transformers"), help="Default: from the configuration.")
    parser.add_argument("--dtypes", nargs="+", default=[*_PARTS], choices=[*_PARTS], help="Types.")
    parser.add_argument("--trust_remote_code", action="store_true", help="Run code that comes with the model.")
    if subparsers is not None:
        parser.set_defaults(func=estimate_command)
    return parser


def estimate_command(args: argparse.Namespace) -> None:
    """Print ``gather_data`` as a table."""
    from hpcaccel.runtime.compat.introspection import convert_bytes

    rows = [["dtype", "largest layer", "total size", "training with Adam"]]
    for dtype, largest, total, training in gather_data(args):
        peak = max(training.values())
        rows.append([dtype, convert_bytes(largest), convert_bytes(total), "-" if peak < 0 else convert_bytes(peak)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"Memory of {args.model_name}")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
