"""``cluster``: profiles of clusters, what was found out of them, and hpcaccel on their file systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcaccel.cli.cluster_install import install
from hpcaccel.cli.options import Json
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.root_help import WholeSummaries
from hpcaccel.errors import SpecError, UserError

if TYPE_CHECKING:
    from hpcaccel.spec import ClusterProfile
    from hpcaccel.spec.site import SiteFacts

__all__ = ["app"]

app = typer.Typer(
    cls=WholeSummaries,
    help="Clusters: profiles, what is known of them, and hpcaccel there.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The profile's name.", show_default=False)]


@app.command()
def add(
    name: Name,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="USER@LOGIN", help="The login node, where Slurm is not on this machine.", show_default=False
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A default of the site: slurm.account=abc, runs_dir=/scratch/me/runs.",
            show_default=False,
        ),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Take this profile where no --cluster is given.")] = False,
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="Find out now what the cluster is like.")] = True,
    json: Json = False,
) -> None:
    """Write a profile, and find out what its cluster is like."""
    from hpcaccel.spec.site import store_facts
    from hpcaccel.submission.probing.profiles import completed, new_profile, validated, write_profile

    values = new_profile(name, host=host, default=default, settings=settings or [])
    if default and (taken := _default_name()):
        raise SpecError(f"profile {taken!r} is the default already: take `default: true` out of it, or leave --default")
    told: list[str] = []
    facts = None
    if probe and values.get("backend") != "local":
        facts = _probed(validated(name, values))
        values, told = completed(values, facts)
    path = write_profile(name, values)
    if facts is not None:
        store_facts(facts)
    if json:
        print_json({"profile": str(path), "values": values, "facts": facts and facts.model_dump(mode="json")})
        return
    typer.echo(f"wrote {path}")
    for line in told:
        typer.echo(f"  {line}")
    if facts is not None:
        _tell(facts)
    typer.echo(f"next: hpcaccel cluster check {name}; hpcaccel validate job.yaml --cluster {name}")


@app.command("list")
def list_(json: Json = False) -> None:
    """The profiles, and how old is what is known of their clusters."""
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
    """Find out anew what the cluster is like, and keep it."""
    from hpcaccel.spec.site import store_facts

    facts = _probed(_profile(name))
    path = store_facts(facts)
    if json:
        print_json(facts.model_dump(mode="json"))
        return
    _tell(facts)
    typer.echo(f"kept in {path}")


@app.command()
def show(name: Name, json: Json = False) -> None:
    """A profile, and what is known of its cluster."""
    from hpcaccel.spec.site import facts_text, load_facts

    profile = _profile(name)
    facts = load_facts(name)
    if json:
        print_json({"profile": profile.model_dump(mode="json"), "facts": facts and facts.model_dump(mode="json")})
        return
    if profile.source is not None:
        typer.echo(f"# {profile.source}\n{profile.source.read_text(encoding='utf-8').rstrip()}\n")
    if facts is None:
        note(f"nothing is known of the cluster yet: hpcaccel cluster probe {name}")
        return
    typer.echo(f"# {facts.age_text()} old\n{facts_text(facts).rstrip()}")


@app.command()
def check(name: Name, json: Json = False) -> None:
    """Compare a profile with what is known of its cluster, without asking it; exit code 2 where they disagree."""
    from hpcaccel.spec.site import load_facts
    from hpcaccel.submission.probing import STALE_DAYS
    from hpcaccel.submission.probing import check as compare

    profile = _profile(name)
    facts = load_facts(name)
    if facts is None:
        raise UserError(f"nothing is known of cluster {name!r} yet: hpcaccel cluster probe {name}")
    found = compare(profile, facts)
    wrong = any(one.is_error for one in found)
    is_old = facts.age_seconds() > STALE_DAYS * 86400
    if json:
        findings = [{"key": one.key, "message": one.message, "error": one.is_error} for one in found]
        print_json({"agrees": not wrong, "findings": findings, "age_seconds": round(facts.age_seconds())})
    else:
        for one in found:
            typer.echo(f"{'error' if one.is_error else 'warning'}: {one}")
        advice = f"; old: hpcaccel cluster probe {name}" if is_old else ""
        verdict = "contradicts" if wrong else "agrees with"
        typer.echo(f"profile {name} {verdict} what is known of its cluster (facts {facts.age_text()} old{advice})")
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
    """What starts programs where the profile's Slurm is."""
    import subprocess

    if profile.host is None:
        yield subprocess.run
        return
    from hpcaccel.submission.remote import RemoteCluster

    with RemoteCluster(profile) as cluster:
        yield cluster.runner


def _probed(profile: ClusterProfile) -> SiteFacts:
    from hpcaccel.submission.probing import probe as find_out

    note(f"asking {profile.host or 'Slurm on this machine'} …")
    with _runner(profile) as run:
        return find_out(profile, run)


def _row(name: str) -> dict[str, Any]:
    """A line of the list; a profile or facts that cannot be read are named as such."""
    from hpcaccel.spec.site import load_facts

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


def _tell(facts: SiteFacts) -> None:
    """The facts in a few lines for people."""
    from hpcaccel.view.formatting import duration

    config = facts.config
    typer.echo(f"Slurm {facts.slurm_version}, cluster {config.cluster_name or '?'}, as {facts.user}")
    for one in facts.partitions:
        limit = "no limit" if one.max_time_minutes is None else f"up to {duration(60 * one.max_time_minutes)}"
        preempted = f", preempted: {one.preempt_mode}, grace {one.grace_seconds} s" if one.preempt_mode != "OFF" else ""
        mark = "*" if one.default else ""
        typer.echo(f"  {one.name}{mark}: {one.nodes} nodes ({', '.join(one.node_types)}), {limit}{preempted}")
    accounts = ", ".join(sorted({one.account for one in facts.accounts})) or "none known"
    typer.echo(f"  accounts: {accounts}; QOS: {', '.join(one.name for one in facts.qos) or 'none known'}")
    requeued = {True: "requeued by default", False: "requeued only when they ask", None: "requeue unknown"}
    jobs = f"jobs: {requeued[config.job_requeue]}, KillWait {config.kill_wait_seconds} s"
    typer.echo(f"  {jobs}; arrays: indices below {config.max_array_size}")
    given = facts.containers.model_dump(exclude_none=True)
    typer.echo(f"  containers: {', '.join(key for key, value in given.items() if value) or 'none found'}")
    for line in facts.unknown:
        typer.echo(f"  unknown: {line}")
