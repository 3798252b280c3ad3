"""Which ``DeepSpeedPlugin`` a training uses: the script's, one of several, or one from the spec or the environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.deepspeed.plugin import DeepSpeedPlugin
from hpcaccel.runtime.settings import Settings

__all__ = [
    "active_plugin",
    "choose_plugin",
    "get_active_deepspeed_plugin",
    "plugin_named",
    "select_plugin",
]


def active_plugin(given: Any) -> DeepSpeedPlugin | None:
    """The plugin that ``prepare`` uses: the only one, or the selected one of a dict. None if there is none."""
    if not isinstance(given, dict):
        found: DeepSpeedPlugin | None = given
        return found
    return next((plugin for plugin in given.values() if plugin.selected), None)


def select_plugin(given: Any, name: str | None = None) -> None:
    """Select one of several plugins by its name, or the first one.

    Raises:
        RuntimeMisuse: there is no plugin with this name.
    """
    wanted = plugin_named(given, next(iter(given), None) if name is None and isinstance(given, dict) else name)
    for plugin in given.values() if isinstance(given, dict) else ():
        plugin._selected = False
    wanted.select(_from_accelerator_state=True)


def plugin_named(given: Any, name: str | None) -> DeepSpeedPlugin:
    """The plugin with this name. A single plugin has no name and is returned whatever ``name`` is.

    Raises:
        RuntimeMisuse: there is no plugin with this name.
    """
    if isinstance(given, DeepSpeedPlugin):
        return given
    if name not in (given or ()):
        raise RuntimeMisuse(f"there is no DeepSpeedPlugin {name!r} (there are: {', '.join(given or ()) or 'none'})")
    found: DeepSpeedPlugin = given[name]
    return found


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """The plugin that an ``AcceleratorState`` uses.

    Raises:
        RuntimeMisuse: the training does not use DeepSpeed.
    """
    found = active_plugin(state.deepspeed_plugins)
    if found is None:
        raise RuntimeMisuse("this training does not use DeepSpeed: pass Accelerator(deepspeed_plugin=...)")
    return found


def choose_plugin(handlers: Any, settings: Settings) -> tuple[Any, str]:
    """The plugin or plugins of a training with strategy ``deepspeed``, the first of them selected.

    Args:
        handlers: the script's handlers and plugins by name.

    Returns:
        The script's plugins, or one from the spec or the environment; and the training's precision, which the JSON
        configuration sets if the Accelerator's is ``no``.

    Raises:
        RuntimeMisuse: a plugin's value is not allowed; its precision is not the training's; the script passes an
            FSDP plugin; or DeepSpeed is not installed.
    """
    if handlers.fsdp is not None:
        raise RuntimeMisuse("strategy=deepspeed cannot be combined with an fsdp_plugin: pass one of them")
    if "deepspeed" not in sys.modules and find_spec("deepspeed") is None:
        raise RuntimeMisuse("strategy=deepspeed needs DeepSpeed, which is not installed: pip install deepspeed")
    given = handlers.deepspeed if handlers.deepspeed is not None else _from_spec(settings.deepspeed)
    for plugin in given.values() if isinstance(given, dict) else [given]:
        if not isinstance(plugin, DeepSpeedPlugin):
            raise RuntimeMisuse(f"Accelerator(deepspeed_plugin=...) got {plugin!r}, which is not a DeepSpeedPlugin")
        plugin.set_mixed_precision(settings.mixed_precision)
    if active_plugin(given) is None or not isinstance(given, dict):
        select_plugin(given)
    active = active_plugin(given)
    assert active is not None
    own = active.mixed_precision or "no"
    return given, own if settings.mixed_precision == "no" else settings.mixed_precision


def _from_spec(section: Mapping[str, Any]) -> DeepSpeedPlugin:
    """The plugin of the spec's section ``runtime.deepspeed``; values that it does not set come from the environment."""
    return DeepSpeedPlugin(
        hf_ds_config=section.get("config_file"),
        zero_stage=section.get("zero_stage"),
        gradient_clipping=section.get("gradient_clipping"),
        offload_optimizer_device=section.get("offload_optimizer"),
        offload_param_device=section.get("offload_params"),
    )
