"""Specs for clusters behind SSH: loaded for the cluster, rendered and planned there, submitted there once."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hpcaccel.errors import HpcaccelError, SlurmCommandError, SpecError, UserError
from hpcaccel.service.behind_ssh.cluster_commands import ClusterCommands
from hpcaccel.service.client_answers import Submission
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.service.spec_requests import SpecRequest, any_spec, directory_of, job_spec, sweep_spec
from hpcaccel.spec.cluster.cluster_facts import load_facts
from hpcaccel.spec.loading.overrides import grid_size
from hpcaccel.submission.clusters.checks import advice_or_refusal
from hpcaccel.submission.remote.bundle import expanded_on, pack_spec
from hpcaccel.submission.remote.delivery import BundleReceipt, asked, hand_over
from hpcaccel.submission.remote.remote_index import name_there

__all__ = ["plan_there", "render_there", "submit_there", "variables_of"]

_MESSAGE = re.compile(r"^(error|hint|note|warning): ", re.MULTILINE)


def variables_of(there: ClusterCommands | None, request: SpecRequest) -> AbstractContextManager[None]:
    """Context manager that loads specs for the cluster ``there``, with its variables; None stands for this machine."""
    return nullcontext() if there is None else expanded_on(there.connected(), request.text())


def render_there(there: ClusterCommands, request: SpecRequest, settings: ServiceSettings) -> str:
    """The batch script that the cluster would submit.

    Raises:
        SpecError: the spec is not valid.
        ClusterError: the cluster cannot be reached.
    """
    return _asked(there, request, settings, ["render"]).out.decode("utf-8", "replace")


def plan_there(there: ClusterCommands, request: SpecRequest, settings: ServiceSettings) -> list[dict[str, Any]]:
    """The expected starts according to the cluster's Slurm. Errors are those of :func:`render_there`."""
    chosen = {"--partition": request.partitions, "--nodes": request.nodes}
    options = [f"{option}={','.join(values)}" for option, values in chosen.items() if values]
    found: list[dict[str, Any]] = json.loads(_asked(there, request, settings, ["plan", "--json", *options]).out)
    return found


def submit_there(
    there: ClusterCommands, request: SpecRequest, settings: ServiceSettings, *, is_sweep: bool
) -> Submission:
    """Send the code and submit the spec on the cluster, once per key; without a key, once even if this process is
    killed before it has the reply and the same request is repeated.

    Raises:
        SpecError: the spec is not valid, or contradicts the facts about the cluster.
        ClusterError: the cluster cannot be reached. The same request can be repeated.
        UserError: the cluster refused it.
        SlurmCommandError: Slurm did not respond there. The same request can be repeated.
    """
    cluster = there.connected()
    with expanded_on(cluster, request.text()):
        spec = sweep_spec(request, settings) if is_sweep else job_spec(request, settings)
        bundle = pack_spec(cluster, spec, base=directory_of(request, settings))
    tasks = grid_size(request.grid) if request.grid else None
    advice_or_refusal(bundle.jobs[0], there.profile, array_tasks=tasks, can_leave_aside=False)
    options = ["--json", *_options(there, request, is_sweep=is_sweep)]
    receipt = hand_over(
        cluster, bundle, options, runs_dir=None, dry_run=False, columns=None, key=request.idempotency_key
    )
    if receipt.code or receipt.run is None:
        raise _refusal(there, receipt, "sweep start" if is_sweep else "submit")
    run = receipt.run
    return Submission(
        run_id=f"{there.name}:{run['run_id']}", name=run["name"], job_id=run["job_id"], path=run["path"],
        cluster=there.name, tasks=_workers(receipt) if is_sweep else tasks, repeated=receipt.earlier,
        warnings=_messages(receipt.err, "note", "warning"),
    )  # fmt: skip


def _options(there: ClusterCommands, request: SpecRequest, *, is_sweep: bool) -> list[str]:
    """The options of ``submit`` on the cluster, with the names that runs have there."""
    given = {"--grid": request.grid, "--from": [request.from_run] if request.from_run else [], "--after": request.after}
    if is_sweep:
        return []  # a sweep has none of them, here as well
    return [f"{option}={name_there(there.name, value)}" for option, values in given.items() for value in values]


def _workers(receipt: BundleReceipt) -> int | None:
    """The number of workers: in the message about a new sweep, or in the state of one that was started before."""
    workers = json.loads(receipt.out)["workers"]
    return sum(workers.values()) if isinstance(workers, dict) else int(workers)


def _asked(
    there: ClusterCommands, request: SpecRequest, settings: ServiceSettings, command: Sequence[str]
) -> BundleReceipt:
    """The output of a command on the cluster that only checks the spec; of a sweep, its job."""
    load_facts(there.name)  # raises SpecError if this machine's facts file is invalid
    cluster = there.connected()
    with expanded_on(cluster, request.text()):
        spec = any_spec(request, settings)
        bundle = pack_spec(cluster, spec, base=directory_of(request, settings), to_submit=False)
    receipt = asked(cluster, bundle, command, columns=None)
    if receipt.code:
        raise _refusal(there, receipt, command[0])
    return receipt


def _refusal(there: ClusterCommands, receipt: BundleReceipt, command: str) -> HpcaccelError:
    """The error of a command on the cluster."""
    problems, hints = _messages(receipt.err, "error"), _messages(receipt.err, "hint")
    if receipt.code != UserError.exit_code:
        text = "\n".join([*problems, *hints]) or receipt.err.decode("utf-8", "replace").strip()
        return SlurmCommandError([f"hpcaccel {command} on {there.name}"], receipt.code, text)
    if len(problems) > 1 or hints:
        return SpecError(problems, hints=hints)
    return UserError("\n".join(problems) or f"{there.name} refused `hpcaccel {command}` without a reason")


def _messages(output: bytes, *labels: str) -> list[str]:
    """The messages with one of these labels in what a command has printed on stderr."""
    parts = _MESSAGE.split(output.decode("utf-8", "replace"))
    return [text.strip() for label, text in zip(parts[1::2], parts[2::2], strict=True) if label in labels]
