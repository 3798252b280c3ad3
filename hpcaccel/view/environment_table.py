"""The report of ``hpcaccel env`` as text, to be pasted into a bug report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from hpcaccel.core.formatting import clean, size
from hpcaccel.view.text_tables import console_for, print_facts

__all__ = ["print_environment"]


def print_environment(report: Mapping[str, Any], *, stream: TextIO | None = None) -> None:
    """Print the report of ``hpcaccel.launch.environment_report``."""
    lines = ((label, clean(text)) for label, text in _facts(report))
    print_facts(lines, console=console_for(stream))


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    system, runs = report["system"], report["runs_dir"]
    yield "hpcaccel", f"{report['hpcaccel']} in {report['installed_in']}"
    yield "Python", f"{report['python']} ({report['python_program']})"
    too_old = " (older than 5.5: processes may hang)" if system["kernel_too_old"] else ""
    yield "system", f"{system['os']}, {system['machine']}, {system['cpus']} CPUs, {system['libc'] or 'unknown libc'}"
    yield "kernel", f"{system['kernel']}{too_old}"
    yield from _torch(report["torch"])
    yield "packages", ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    if report["package_indexes"]:
        yield "package indexes", ", ".join(report["package_indexes"])
    for program, lines in report["gpus"].items():
        yield program, "; ".join(lines) or "no output"
    if not report["gpus"]:
        yield "GPUs", "neither nvidia-smi nor rocm-smi is on PATH"
    yield "Slurm", report["slurm"] or "not found"
    yield from report["allocation"].items()
    if report["other_variables"]:
        yield "also set", f"{', '.join(report['other_variables'])} (values not shown)"
    yield "runs directory", f"{runs['path']}{'' if runs['exists'] else ' (not created yet)'}"
    free = f", {size(runs['free_bytes'])} free" if "free_bytes" in runs else f", {runs['problem']}"
    writable = "" if runs.get("writable", True) else ", not writable"
    yield "its file system", f"{runs['file_system'] or 'unknown'}{free}{writable}"
    yield "cluster profile", report["cluster_profile"] or "none"
    yield from _launch_config(report["launch_config"])


def _torch(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "problem" in facts:
        yield "torch", f"cannot be imported: {facts['problem']}"
        return
    built = [f"{label} {facts[key]}" for key, label in (("cuda", "CUDA"), ("rocm", "ROCm")) if facts[key]]
    built += [f"{label} {facts[key]}" for key, label in (("nccl", "NCCL"), ("cudnn", "cuDNN")) if facts[key]]
    yield "torch", f"{facts['version']} ({', '.join(built) or 'CPU only'}; backends: {', '.join(facts['backends'])})"
    for index, device in enumerate(facts["devices"]):
        memory = "" if device["bytes"] is None else f", {device['bytes'] / 2**30:.1f} GiB"
        yield f"{facts['kind']}:{index}", f"{device['name']}{memory}"


def _launch_config(found: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if found is None:
        yield "launch config", "none"
    elif "problem" in found:
        yield "launch config", f"cannot be used: {found['problem']}"
    else:
        yield "launch config", found["path"]
        for key, value in found["values"].items():
            yield f"  {key}", value if isinstance(value, str) else json.dumps(value)
