"""DeepSpeed's JSON configuration with ``auto`` values, which ``prepare`` fills from the script's objects."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from hpcaccel.errors import RuntimeMisuse

__all__ = ["AUTO", "ConfigValues", "HfDeepSpeedConfig", "fill"]

AUTO = "auto"
_OFFLOADED = ("cpu", "nvme")


class HfDeepSpeedConfig:
    """A configuration as a nested dict (attribute ``config``), whose values are found by dotted name.

    Args:
        config_file_or_dict: path of a JSON file, a dict, which is copied, or the JSON text, possibly in base64.

    Raises:
        RuntimeMisuse: the file does not exist or does not contain a JSON object.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Update the ZeRO stage and ``is_offload`` from ``config``. Call this after ``config`` has been changed."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = [self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")]
        self._offload = self._stage in (2, 3) and any(device in _OFFLOADED for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section that contains a value (None if there is no such section), and the value's name in it."""
        *sections, name = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), name

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        node, name = self.find_config_node(ds_key_long)
        return default if node is None else node.get(name, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a section or a value.

        Raises:
            RuntimeMisuse: it does not exist, and ``must_exist`` is true.
        """
        node, name = self.find_config_node(ds_key_long)
        if node is None or name not in node:
            if must_exist:
                raise RuntimeMisuse(f"the DeepSpeed configuration has no {ds_key_long}")
            return
        del node[name]

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the value is set and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the value is set and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters are stored in CPU memory or on NVMe disks."""
        return self._offload


def _read(source: Any) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return deepcopy(dict(source))
    text = os.fspath(source) if isinstance(source, str | os.PathLike) else ""
    is_text = text.lstrip().startswith("{")
    try:
        if not is_text and Path(text).is_file():
            found = json.loads(Path(text).read_text(encoding="utf-8"))
        else:
            found = json.loads(text if is_text else base64.urlsafe_b64decode(text).decode())
    except (OSError, ValueError, binascii.Error) as error:
        raise RuntimeMisuse(
            f"the DeepSpeed configuration {source!r} is neither a dict nor the path of a JSON file: {error}"
        ) from error
    if not isinstance(found, dict):
        raise RuntimeMisuse(f"the DeepSpeed configuration {source!r} is a JSON {type(found).__name__}, not an object")
    return found


class ConfigValues:
    """Reads and fills the values of a configuration; the base class of ``DeepSpeedPlugin``."""

    hf_ds_config: Any
    deepspeed_config: dict[str, Any]
    """The configuration that DeepSpeed gets: ``hf_ds_config.config``."""

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of ``ds_key_long``, such as ``zero_optimization.stage``, in the JSON configuration."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value of the key (``a.b`` for nested keys) is ``"auto"``."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace the value if it is ``auto``.

        Args:
            ds_key_long: the key, ``a.b`` for nested keys.
            mismatches: a list to which a message is added if the value is set to something else.
            must_match: whether values are compared.
            kwargs: the replacements, by dotted name.

        Raises:
            RuntimeMisuse: the value is ``auto``, and there is no replacement.
        """
        node, name = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        if node.get(name) == AUTO:
            if ds_key_long not in kwargs:
                raise RuntimeMisuse(
                    f'{ds_key_long} is "auto" in the DeepSpeed configuration, and no value was passed for it'
                )
            node[name] = kwargs[ds_key_long]
        elif must_match and node.get(name) is not None and node[name] != kwargs.get(ds_key_long, node[name]):
            found = f"{ds_key_long}: {node[name]!r} in the configuration, {kwargs[ds_key_long]!r} in the script"
            (mismatches if mismatches is not None else []).append(found)

    def deepspeed_config_process(self, must_match: bool = True, **kwargs: Any) -> None:
        """Replace all ``auto`` values. The keys of ``kwargs`` are dotted names.

        Raises:
            RuntimeMisuse: a value has no replacement; or, with ``must_match``, a value is set to something else.
        """
        wrong: list[str] = []
        for name in kwargs if must_match else ():
            self.fill_match(name, wrong, **kwargs)
        if wrong:
            raise RuntimeMisuse(
                f"the DeepSpeed configuration does not match the script ({'; '.join(wrong)}): write auto instead"
            )
        fill(self.deepspeed_config, kwargs, optional=("optimizer.params.", "scheduler.params."))

    @property
    def mixed_precision(self) -> str | None:
        """The precision that the JSON configuration enables; None if it enables none."""
        return next((kind for kind in ("bf16", "fp16") if self.get_value(f"{kind}.enabled") is True), None)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Enable the Accelerator's precision in the configuration.

        Raises:
            RuntimeMisuse: the configuration enables the other half precision; or it is fp8.
        """
        if mixed_precision == "fp8":
            raise RuntimeMisuse("mixed_precision=fp8 with DeepSpeed is not supported: use bf16")
        enabled = self.mixed_precision
        if mixed_precision != "no" and enabled not in (None, mixed_precision):
            raise RuntimeMisuse(
                f"mixed_precision={mixed_precision!r} conflicts with {enabled}.enabled in the DeepSpeed configuration: "
                "set the precision in one place"
            )
        if mixed_precision != "no":
            more = {"auto_cast": True} if mixed_precision == "fp16" else {}
            self.deepspeed_config.setdefault(mixed_precision, {"enabled": True, **more})
        for kind in ("fp16", "bf16"):
            section = self.deepspeed_config.setdefault(kind, {"enabled": False})
            if section.get("enabled", AUTO) == AUTO:
                section["enabled"] = kind == mixed_precision


def fill(config: dict[str, Any], values: Mapping[str, Any], optional: tuple[str, ...] = ()) -> None:
    """Replace each ``auto`` in place.

    Args:
        values: the replacements, by dotted name.
        optional: prefixes of dotted names. A value whose name begins with one of them and that has no replacement is
            deleted, so that DeepSpeed's or torch's default applies.

    Raises:
        RuntimeMisuse: a value has no replacement.
    """
    missing = []
    for node, name, full in list(_autos(config, "")):
        if full in values:
            node[name] = values[full]
        elif full.startswith(optional) and isinstance(node, dict):
            del node[name]
        else:
            missing.append(full)
    if missing:
        raise RuntimeMisuse(
            f'the DeepSpeed configuration has the value "auto" for {", ".join(missing)}, which cannot be computed from '
            "the objects passed to prepare(): write a number instead"
        )


def _autos(node: Any, prefix: str) -> Iterator[tuple[Any, Any, str]]:
    """Each ``auto`` in ``node``: the section or list that contains it, its name or index there, and its dotted name,
    such as ``optimizer.params.betas[0]``."""
    is_list = isinstance(node, list)
    for name, value in enumerate(node) if is_list else node.items():
        full = f"{prefix}[{name}]" if is_list else f"{prefix}.{name}".removeprefix(".")
        if isinstance(value, dict | list):
            yield from _autos(value, full)
        elif value == AUTO:
            yield node, name, full
