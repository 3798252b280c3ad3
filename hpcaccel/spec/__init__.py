"""What a user may ask for: the job spec, cluster profiles, and errors that teach."""

from hpcaccel.spec.canonical import from_json, spec_hash, to_json, to_yaml
from hpcaccel.spec.cluster import ClusterProfile, load_profile, profile_names
from hpcaccel.spec.grid import grid
from hpcaccel.spec.job import JobSpec
from hpcaccel.spec.json_schema import schema
from hpcaccel.spec.load import load_spec, spec_from_values

__all__ = [
    "ClusterProfile",
    "JobSpec",
    "from_json",
    "grid",
    "load_profile",
    "load_spec",
    "profile_names",
    "schema",
    "spec_from_values",
    "spec_hash",
    "to_json",
    "to_yaml",
]
