"""Sections of a cluster's facts: settings, partitions, node types, accounts, QOS, containers, quotas.

Field names contain the units of times and sizes. ``None`` in a limit means that there is no limit; in other facts it
means that the fact is unknown.
"""

from __future__ import annotations

from pydantic import Field

from hpcaccel.spec.job.fields import Flag, Natural, Section, Text, Word, text_list

__all__ = ["UNTYPED", "Account", "Containers", "NodeType", "Partition", "Qos", "Quota", "SiteConfig"]

UNTYPED = "gpu"
"""The name used as GPU type if the site configures no types (``Gres=gpu:4``)."""


class SiteConfig(Section):
    """The cluster's settings, from ``scontrol show config``: the names of slurm.conf(5) in snake case."""

    cluster_name: Text = Field(default="", description="ClusterName.")
    max_array_size: Natural | None = Field(
        default=None, description="MaxArraySize: the highest array index plus one; 0: no job arrays."
    )
    max_job_count: Natural | None = Field(default=None, description="MaxJobCount: maximum number of jobs of all users.")
    max_batch_requeue: Natural | None = Field(
        default=None, description="MaxBatchRequeue: number of automatic requeues after which Slurm holds a job."
    )
    kill_wait_seconds: Natural | None = Field(
        default=None, description="KillWait: seconds between SIGTERM and SIGKILL at a limit or a preemption."
    )
    job_requeue: Flag | None = Field(
        default=None,
        description="JobRequeue: whether jobs are requeued by default; sbatch --requeue overrides it.",
    )
    expedited_requeue: Flag | None = Field(
        default=None,
        description="Whether sbatch accepts --requeue=expedite: Slurm 25.11 or later, with enable_expedited_requeue in "
        "SlurmctldParameters.",
    )
    preempt_type: Text | None = Field(
        default=None, description="PreemptType: preempt/none, preempt/partition_prio, preempt/qos."
    )
    preempt_mode: Text | None = Field(
        default=None, description="PreemptMode of the cluster: OFF, CANCEL, REQUEUE, SUSPEND, possibly with GANG."
    )
    preempt_exempt_seconds: Natural | None = Field(
        default=None, description="PreemptExemptTime: seconds that a job runs before it can be preempted."
    )
    accounting: Flag | None = Field(
        default=None, description="Whether Slurm has accounting (slurmdbd); null: it could not be queried."
    )
    accounting_enforce: list[Word] = text_list(
        "AccountingStorageEnforce: [associations, limits, qos]; empty: accounts and QOS are not checked."
    )
    enforce_part_limits: Text | None = Field(
        default=None,
        description="EnforcePartLimits. NO: a job beyond a partition's limits stays pending. ALL, ANY: it is rejected.",
    )
    select_type: Text | None = Field(default=None, description="SelectType, such as select/cons_tres.")
    select_type_parameters: Text | None = Field(
        default=None, description="SelectTypeParameters: what is allocated, such as CR_CORE_MEMORY."
    )
    over_time_limit_minutes: Natural | None = Field(
        default=None, description="OverTimeLimit: minutes that a job may run beyond its limit; null: no limit."
    )
    def_mem_per_node_mb: Natural | None = Field(
        default=None, description="DefMemPerNode, in megabytes: memory per node of a job that requests none."
    )
    def_mem_per_cpu_mb: Natural | None = Field(default=None, description="DefMemPerCPU, in megabytes.")
    max_mem_per_node_mb: Natural | None = Field(default=None, description="MaxMemPerNode, in megabytes.")
    licenses: list[Word] = text_list("Licences of the cluster, in the syntax of slurm.conf: [matlab:10].")
    submit_plugins: list[Word] = text_list("JobSubmitPlugins, which may change or reject a job.")
    topology: Text | None = Field(default=None, description="TopologyPlugin; --switches needs topology/tree.")


class Partition(Section):
    """A partition, from ``scontrol show partition``. An allow list that is null allows everyone."""

    name: Word = Field(description="The partition's name.")
    default: Flag = Field(default=False, description="Whether this is the default partition.")
    state: Text = Field(default="UP", description="UP, DOWN (jobs wait), DRAIN (no new jobs), INACTIVE.")
    max_time_minutes: Natural | None = Field(default=None, description="MaxTime in minutes; null: no limit.")
    default_time_minutes: Natural | None = Field(
        default=None, description="DefaultTime in minutes; null: the same as max_time_minutes."
    )
    max_nodes: Natural | None = Field(default=None, description="MaxNodes of one job; null: no limit.")
    min_nodes: Natural = Field(default=0, description="MinNodes of one job.")
    nodes: Natural = Field(default=0, description="Number of nodes in the partition.")
    max_cpus_per_node: Natural | None = Field(default=None, description="MaxCPUsPerNode; null: no limit.")
    max_mem_per_node_mb: Natural | None = Field(
        default=None, description="MaxMemPerNode in megabytes; null: the cluster's value."
    )
    def_mem_per_node_mb: Natural | None = Field(default=None, description="DefMemPerNode in megabytes.")
    def_mem_per_cpu_mb: Natural | None = Field(default=None, description="DefMemPerCPU in megabytes.")
    allow_accounts: list[Word] | None = Field(default=None, description="Accounts that may submit here.")
    deny_accounts: list[Word] = text_list("Accounts that may not submit here; ignored unless allow_accounts is null.")
    allow_qos: list[Word] | None = Field(default=None, description="QOS that may be used here.")
    deny_qos: list[Word] = text_list("QOS that may not be used here; ignored unless allow_qos is null.")
    allow_groups: list[Word] | None = Field(default=None, description="Unix groups that may submit here.")
    qos: Text | None = Field(default=None, description="The QOS whose limits apply to the whole partition.")
    preempt_mode: Text | None = Field(
        default=None, description="What happens to preempted jobs of this partition: OFF, CANCEL, REQUEUE …"
    )
    grace_seconds: Natural = Field(
        default=0, description="GraceTime: seconds between SIGTERM and SIGKILL in a preemption."
    )
    priority_tier: Natural = Field(
        default=1, description="PriorityTier: jobs of higher tiers preempt others and start first."
    )
    exclusive: Flag = Field(default=False, description="Jobs get whole nodes (OverSubscribe=EXCLUSIVE).")
    root_only: Flag = Field(default=False, description="Only root may submit here.")
    reservation_required: Flag = Field(
        default=False, description="Only jobs with a reservation may run here (ReqResv)."
    )
    over_time_limit_minutes: Natural | None = Field(
        default=None, description="OverTimeLimit of the partition; null: the cluster's value."
    )
    node_types: list[Word] = text_list("Names of the node types in the partition.")


class NodeType(Section):
    """A group of nodes with the same GPUs, CPUs, memory and features."""

    name: Word = Field(description="A name built from the nodes' resources, such as 4xa100-64cpu-500G.")
    gpus: dict[Word, Natural] = Field(
        default_factory=dict, description="GPUs per node by type, {a100: 4}; gpu stands for GPUs without a type."
    )
    cpus: Natural = Field(default=0, description="CPUs per node that jobs can use (hardware threads if enabled).")
    sockets: Natural | None = Field(default=None, description="Sockets per node.")
    threads_per_core: Natural | None = Field(
        default=None, description="Threads per core; 2: Slurm counts hyper-threads as CPUs."
    )
    memory_mb: Natural = Field(default=0, description="Memory per node in MiB (2**20 bytes).")
    tmp_disk_mb: Natural | None = Field(default=None, description="TmpDisk: node-local disk in MiB; null: unknown.")
    features: list[Word] = text_list("Features that --constraint accepts.")
    gres: list[Word] = text_list("Other generic resources per node, in Slurm's syntax: [nvme:1].")
    count: Natural = Field(default=0, description="Number of nodes of this type.")
    nodes: Text = Field(default="", description="The nodes as a host list: n[1-4].")
    states: dict[Word, Natural] = Field(
        default_factory=dict, description="Number of nodes in each state at the probe: {idle: 3, drained: 1}."
    )

    @property
    def gpu_count(self) -> int:
        """GPUs of one node, of all types."""
        return sum(self.gpus.values())


class Account(Section):
    """An association of the user, from ``sacctmgr show associations``."""

    account: Word = Field(description="Value for --account.")
    partition: Word | None = Field(default=None, description="The only partition the association covers; null: all.")
    default: Flag = Field(default=False, description="Whether jobs that name no account are charged to this one.")
    qos: list[Word] = text_list("QOS that may be used with this account.")
    default_qos: Word | None = Field(default=None, description="The QOS of a job that requests none.")
    max_wall_minutes: Natural | None = Field(default=None, description="MaxWall: the longest time limit of a job.")
    max_jobs: Natural | None = Field(default=None, description="MaxJobs: maximum number of running jobs.")
    max_submit: Natural | None = Field(
        default=None, description="MaxSubmit: maximum number of jobs in the queue, including array tasks."
    )
    max_tres: dict[Word, Text] = Field(
        default_factory=dict, description="MaxTRES of one job in Slurm's syntax, {gres/gpu: 16, node: 4}."
    )
    group_tres: dict[Word, Text] = Field(
        default_factory=dict, description="GrpTRES: limit for all running jobs of the association together."
    )


class Qos(Section):
    """A QOS, from ``sacctmgr show qos``. For limits, null means no limit."""

    name: Word = Field(description="Value for --qos.")
    priority: Natural | None = Field(default=None, description="Priority.")
    max_wall_minutes: Natural | None = Field(default=None, description="MaxWall: the longest time limit of a job.")
    max_jobs: Natural | None = Field(default=None, description="MaxJobsPU: maximum number of running jobs per user.")
    max_submit: Natural | None = Field(
        default=None, description="MaxSubmitPU: maximum number of jobs in the queue per user."
    )
    max_nodes: Natural | None = Field(default=None, description="Maximum number of nodes of one job, from MaxTRES.")
    max_tres: dict[Word, Text] = Field(
        default_factory=dict, description="MaxTRES of one job in Slurm's syntax, {gres/gpu: 16}."
    )
    max_tres_per_node: dict[Word, Text] = Field(default_factory=dict, description="MaxTRESPerNode of one job.")
    max_tres_per_user: dict[Word, Text] = Field(default_factory=dict, description="MaxTRESPU of one user's jobs.")
    min_tres: dict[Word, Text] = Field(
        default_factory=dict, description="MinTRES: the minimum that a job must request."
    )
    flags: list[Word] = text_list("Flags, such as DenyOnLimit (a job beyond a limit is rejected) or NoReserve.")
    preempts: list[Word] = text_list("QOS whose jobs this QOS preempts if preempt_type is preempt/qos.")
    preempt_mode: Text | None = Field(
        default=None, description="What happens to preempted jobs of this QOS; cluster: the cluster's setting applies."
    )
    grace_seconds: Natural = Field(default=0, description="GraceTime: seconds between SIGTERM and SIGKILL.")
    preempt_exempt_seconds: Natural | None = Field(default=None, description="PreemptExemptTime in seconds.")


class Containers(Section):
    """Container runtimes on the login node; compute nodes are assumed to have the same ones."""

    pyxis: Flag | None = Field(default=None, description="Whether srun supports --container-image; null: unknown.")
    enroot: Text | None = Field(default=None, description="Version of enroot; null: not found.")
    apptainer: Text | None = Field(default=None, description="Version of Apptainer; null: not found.")
    singularity: Text | None = Field(default=None, description="Version of SingularityCE; null: not found.")


class Quota(Section):
    """The user's quota on a file system. null: unknown, or no limit."""

    path: Word = Field(description="The directory that was queried.")
    source: Text = Field(default="", description="Source of the values: lfs quota, quota, or df (whole file system).")
    bytes_limit: Natural | None = Field(default=None, description="Maximum number of bytes.")
    bytes_used: Natural | None = Field(default=None, description="Bytes in use.")
    inodes_limit: Natural | None = Field(default=None, description="Maximum number of files and directories.")
    inodes_used: Natural | None = Field(default=None, description="Number of files and directories in use.")
