"""The job spec, cluster profiles and sweeps: models, loading and validation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpcaccel.spec.lean_pydantic import without_plugins

with without_plugins():
    from hpcaccel.spec.cluster.cluster_profile import ClusterProfile, load_profile, profile_names
    from hpcaccel.spec.job.job_spec import JobSpec
    from hpcaccel.spec.loading.canonical import from_json, schema, spec_hash, sweep_schema, to_json, to_yaml
    from hpcaccel.spec.loading.load import load_spec, spec_from_values
    from hpcaccel.spec.loading.overrides import grid

if TYPE_CHECKING:
    from hpcaccel.spec.sweep.points import resolve
    from hpcaccel.spec.sweep.sweep_fields import SweepSection, SweepSpec
    from hpcaccel.spec.sweep.sweep_file import load_sweep, sweep_from_values

_SWEEPS = {
    "SweepSection": "sweep.sweep_fields",
    "SweepSpec": "sweep.sweep_fields",
    "load_sweep": "sweep.sweep_file",
    "resolve": "sweep.points",
    "sweep_from_values": "sweep.sweep_file",
}
"""Imported on first access: the sweep models take time to build, and most commands do not need them."""

__all__ = [
    "ClusterProfile",
    "JobSpec",
    "SweepSection",
    "SweepSpec",
    "from_json",
    "grid",
    "load_profile",
    "load_spec",
    "load_sweep",
    "profile_names",
    "resolve",
    "schema",
    "spec_from_values",
    "spec_hash",
    "sweep_from_values",
    "sweep_schema",
    "to_json",
    "to_yaml",
]


def __getattr__(name: str) -> Any:
    if name not in _SWEEPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_SWEEPS[name]}"), name)
    globals()[name] = value
    return value
