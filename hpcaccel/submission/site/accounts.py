"""Accounts, QOS and groups: who may submit what where."""

from __future__ import annotations

from collections.abc import Iterator

from hpcaccel.spec import JobSpec
from hpcaccel.spec.site import Account, Partition, Qos, SiteFacts
from hpcaccel.submission.site.findings import Finding, error, listed, nearest

__all__ = ["accounts", "effective_account", "effective_qos", "groups"]


def effective_account(spec: JobSpec, facts: SiteFacts) -> Account | None:
    """The association that the job is charged to, as far as it is known."""
    if spec.slurm.account is None:
        return next((one for one in facts.accounts if one.default), None)
    ours = [one for one in facts.accounts if one.account == spec.slurm.account]
    return next((one for one in ours if one.partition is None), ours[0] if ours else None)


def effective_qos(spec: JobSpec, facts: SiteFacts) -> Qos | None:
    """The job's own QOS, or the one that its account gives it."""
    account = effective_account(spec, facts)
    name = spec.slurm.qos or (None if account is None else account.default_qos)
    return None if name is None else facts.qos_named(name)


def accounts(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    """What Slurm refuses outright; where it enforces no associations (slurm.conf(5)) it looks at neither."""
    enforced = {word.lower() for word in facts.config.accounting_enforce}
    if not enforced or "none" in enforced:
        return
    yield from _account(spec, facts)
    if "qos" in enforced:
        yield from _qos(spec, facts)


def _account(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    wanted, known = spec.slurm.account, sorted({one.account for one in facts.accounts})
    if wanted is None or not known:
        return
    ours = [one for one in facts.accounts if one.account == wanted]
    if not ours:
        yield error("slurm.account", f"{wanted!r} is none of yours {listed(known)}{nearest(wanted, known)}")
        return
    partitions = set((spec.slurm.partition or "").split(",")) - {""}
    limited = {one.partition for one in ours if one.partition is not None}
    if partitions and not partitions & limited and all(one.partition is not None for one in ours):
        allowed = sorted(limited)
        yield error(
            "slurm.account",
            f"{wanted!r} is yours in partition {' and '.join(allowed)} only, not in {spec.slurm.partition!r}: set "
            f"slurm.partition to {allowed[0]}, or take another account {listed(known)}",
        )


def _qos(spec: JobSpec, facts: SiteFacts) -> Iterator[Finding]:
    wanted, account = spec.slurm.qos, effective_account(spec, facts)
    if wanted is None:
        return
    known = [one.name for one in facts.qos]
    if known and wanted not in known:
        yield error("slurm.qos", f"{wanted!r} is not on cluster {facts.name!r} {listed(known)}{nearest(wanted, known)}")
        return
    ours = [one for one in facts.accounts if account is not None and one.account == account.account]
    allowed = sorted({name for one in ours for name in one.qos})
    if allowed and wanted not in allowed:
        assert account is not None
        yield error(
            "slurm.qos",
            f"{wanted!r} does not belong to account {account.account!r} {listed(allowed)}{nearest(wanted, allowed)}",
        )


def groups(spec: JobSpec, facts: SiteFacts, partition: Partition) -> Iterator[Finding]:
    """Whom a partition lets in: by account, QOS and Unix group (scontrol(1), slurm.conf(5))."""
    account = spec.slurm.account or _name_of(effective_account(spec, facts))
    if account is not None:
        yield from _gate("slurm.account", account, partition, partition.allow_accounts, partition.deny_accounts)
    if spec.slurm.qos is not None:
        yield from _gate("slurm.qos", spec.slurm.qos, partition, partition.allow_qos, partition.deny_qos)
    let_in = partition.allow_groups
    if let_in is not None and facts.groups and not set(let_in) & set(facts.groups):
        yield error(
            "slurm.partition", f"{partition.name!r} is for the groups {', '.join(let_in)}, and you are in none of them"
        )


def _gate(
    key: str, value: str, partition: Partition, allowed: list[str] | None, denied: list[str]
) -> Iterator[Finding]:
    # Slurm compares these names without regard to case
    if allowed is not None and value.lower() not in {name.lower() for name in allowed}:
        yield error(key, f"{value!r} is not let into partition {partition.name!r} {listed(allowed)}")
    elif allowed is None and value.lower() in {name.lower() for name in denied}:
        yield error(key, f"{value!r} is kept out of partition {partition.name!r}: take another one")


def _name_of(account: Account | None) -> str | None:
    return None if account is None else account.account
