"""What a user may ask for: the job spec, cluster profiles, sweeps, and errors that teach."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpcaccel.spec.canonical import from_json, spec_hash, to_json, to_yaml
from hpcaccel.spec.cluster_profile import ClusterProfile, load_profile, profile_names
from hpcaccel.spec.grid import grid
from hpcaccel.spec.job import JobSpec
from hpcaccel.spec.json_schema import schema, sweep_schema
from hpcaccel.spec.load import load_spec, spec_from_values

if TYPE_CHECKING:
    from hpcaccel.spec.sweep_fields import Sweep, SweepSpec
    from hpcaccel.spec.sweep_file import load_sweep, sweep_from_values
    from hpcaccel.spec.trial_spec import resolve

_SWEEPS = {
    "Sweep": "sweep_fields",
    "SweepSpec": "sweep_fields",
    "load_sweep": "sweep_file",
    "resolve": "trial_spec",
    "sweep_from_values": "sweep_file",
}
"""Found when they are asked for: the models of a sweep take time to build, and most commands do without."""

__all__ = [
    "ClusterProfile",
    "JobSpec",
    "Sweep",
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
