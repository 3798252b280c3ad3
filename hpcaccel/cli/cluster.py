"""``cluster``: profiles of clusters, facts about clusters, and installation of hpcaccel on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcaccel.cli.cluster_install import install
from hpcaccel.cli.options import Json, WholeSummaries
from hpcaccel.cli.output import note, print_json
from hpcaccel.errors import SpecError, UserError

if TYPE_CHECKING:
    from hpcaccel.spec import ClusterProfile
    from hpcaccel.spec.cluster.cluster_facts import SiteFacts

__all__ = ["app"]

app = typer.Typer(
    cls=WholeSummaries,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the profile.", show_default=False)]


@app.command()
def add(
    name: Name,
    host: Annotated[
        str | None,
        typer.Option(metavar="USER@LOGIN", help="Login node, if Slurm is not on this machine.", show_default=False),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A site default, such as slurm.account=abc or runs_dir=/scratch/me/runs; repeatable.",
            show_default=False,
        ),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Use this profile when --cluster is not given.")] = False,
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="Probe the cluster now.")] = True,
    json: Json = False,
) -> None:
    """Write a profile and probe its cluster."""
    from hpcaccel.spec.cluster.cluster_facts import store_facts
    from hpcaccel.submission.clusters.probe import completed, new_profile, validated, write_profile

    values = new_profile(name, host=host, default=default, settings=settings or [])
    if default and (taken := _default_name()):
        raise SpecError(f"profile {taken!r} is already the default: remove `default: true` from it, or omit --default")
    completions: list[str] = []
    facts = None
    if probe and values.get("backend") != "local":
        facts = _probe(validated(name, values))
        values, completions = completed(values, facts)
    path = write_profile(name, values)
    if facts is not None:
        store_facts(facts)
    if json:
        print_json({"profile": str(path), "values": values, "facts": facts and facts.model_dump(mode="json")})
        return
    typer.echo(f"wrote {path}")
    for line in completions:
        typer.echo(f"  {line}")
    if facts is not None:
        _print_facts(facts)
    typer.echo(f"next: hpcaccel cluster check {name}; hpcaccel validate job.yaml --cluster {name}")


@app.command("list")
def list_(json: Json = False) -> None:
    """List the profiles, with the age of the stored facts about their clusters."""
    from hpcaccel.spec import profile_names

    rows = [_row(name) for name in profile_names()]
    if json:
        print_json(rows)
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        mark = "*" if row["default"] else " "
        typer.echo(f"{mark} {row['name']:<{width}}  {row['where']:<24}  {row['facts']}".rstrip())


@app.command()
def probe(name: Name, json: Json = False) -> None:
    """Probe the cluster again and store the facts."""
    from hpcaccel.spec.cluster.cluster_facts import store_facts

    facts = _probe(_profile(name))
    path = store_facts(facts)
    if json:
        print_json(facts.model_dump(mode="json"))
        return
    _print_facts(facts)
    typer.echo(f"stored in {path}")


@app.command()
def show(name: Name, json: Json = False) -> None:
    """Show a profile and the stored facts about its cluster."""
    from hpcaccel.spec.cluster.cluster_facts import facts_text, load_facts

    profile = _profile(name)
    facts = load_facts(name)
    if json:
        print_json({"profile": profile.model_dump(mode="json"), "facts": facts and facts.model_dump(mode="json")})
        return
    if profile.source is not None:
        typer.echo(f"# {profile.source}\n{profile.source.read_text(encoding='utf-8').rstrip()}\n")
    if facts is None:
        note(f"no facts about cluster {name!r} are stored yet. Probe it: hpcaccel cluster probe {name}")
        return
    typer.echo(f"# facts, {facts.age_text()} old\n{facts_text(facts).rstrip()}")


@app.command()
def check(name: Name, json: Json = False) -> None:
    """Compare a profile with the stored facts about its cluster; exit code 2 if they disagree."""
    from hpcaccel.spec.cluster.cluster_facts import load_facts
    from hpcaccel.submission.clusters.checks import STALE_DAYS
    from hpcaccel.submission.clusters.checks import check as compare

    profile = _profile(name)
    facts = load_facts(name)
    if facts is None:
        raise UserError(f"no facts about cluster {name!r} are stored yet. Probe it: hpcaccel cluster probe {name}")
    found = compare(profile, facts)
    wrong = any(one.is_error for one in found)
    is_old = facts.age_seconds() > STALE_DAYS * 86400
    if json:
        findings = [{"key": one.key, "message": one.message, "error": one.is_error} for one in found]
        print_json({"agrees": not wrong, "findings": findings, "age_seconds": round(facts.age_seconds())})
    else:
        for one in found:
            typer.echo(f"{'error' if one.is_error else 'warning'}: {one}")
        advice = f"; probe it again: hpcaccel cluster probe {name}" if is_old else ""
        verdict = "contradicts" if wrong else "agrees with"
        typer.echo(f"profile {name} {verdict} the facts about its cluster ({facts.age_text()} old{advice})")
    if wrong:
        raise typer.Exit(UserError.exit_code)


app.command()(install)


def _profile(name: str) -> ClusterProfile:
    from hpcaccel.spec import load_profile

    profile = load_profile(name)
    assert profile is not None
    return profile


def _default_name() -> str | None:
    from hpcaccel.spec import load_profile

    profile = load_profile()
    return None if profile is None else profile.name


@contextmanager
def _runner(profile: ClusterProfile) -> Iterator[Callable[..., Any]]:
    """Yield a replacement for ``subprocess.run`` that runs programs on the profile's host, or on this machine if the
    profile has no host."""
    import subprocess

    if profile.host is None:
        yield subprocess.run
        return
    from hpcaccel.submission.remote import RemoteCluster

    with RemoteCluster(profile) as cluster:
        yield cluster.runner


def _probe(profile: ClusterProfile) -> SiteFacts:
    from hpcaccel.submission.clusters.probe import probe as probe_cluster

    note(f"probing {profile.host or 'Slurm on this machine'} …")
    with _runner(profile) as run:
        return probe_cluster(profile, run)


def _row(name: str) -> dict[str, Any]:
    """The row of the profile ``name`` in ``cluster list``. It contains an error message if the profile or its facts
    cannot be read."""
    from hpcaccel.spec.cluster.cluster_facts import load_facts

    row: dict[str, Any] = {"name": name, "default": False, "where": "", "facts": ""}
    try:
        profile = _profile(name)
        where = "no Slurm" if profile.backend == "local" else profile.host or "this machine"
        row.update(default=profile.default, where=where)
        if profile.backend != "local":
            facts = load_facts(name)
            row["facts"] = "not probed" if facts is None else f"Slurm {facts.slurm_version}, {facts.age_text()} old"
    except SpecError as error:
        row["facts"] = f"error: {error.problems[0]}"
    return row


def _print_facts(facts: SiteFacts) -> None:
    """Print a summary of the facts about a cluster."""
    from hpcaccel.core.formatting import duration

    config = facts.config
    typer.echo(f"Slurm {facts.slurm_version}, cluster {config.cluster_name or '?'}, user {facts.user}")
    for one in facts.partitions:
        limit = "no limit" if one.max_time_minutes is None else f"up to {duration(60 * one.max_time_minutes)}"
        grace = f", preemption: {one.preempt_mode}, grace {one.grace_seconds} s" if one.preempt_mode != "OFF" else ""
        mark = "*" if one.default else ""
        nodes = f"{one.nodes} node{'' if one.nodes == 1 else 's'}"
        typer.echo(f"  {one.name}{mark}: {nodes} ({', '.join(one.node_types)}), {limit}{grace}")
    accounts = ", ".join(sorted({one.account for one in facts.accounts})) or "none known"
    typer.echo(f"  accounts: {accounts}; QOS: {', '.join(one.name for one in facts.qos) or 'none known'}")
    requeued = {True: "requeued by default", False: "requeued only if requested", None: "requeue default unknown"}
    kill_wait = "unknown" if config.kill_wait_seconds is None else f"{config.kill_wait_seconds} s"
    jobs = f"jobs: {requeued[config.job_requeue]}, KillWait {kill_wait}"
    typer.echo(f"  {jobs}; arrays: indices below {config.max_array_size}")
    given = facts.containers.model_dump(exclude_none=True)
    typer.echo(f"  containers: {', '.join(key for key, value in given.items() if value) or 'none found'}")
    for line in facts.unknown:
        typer.echo(f"  unknown: {line}")
