"""The parts of a cluster's facts: its settings, partitions, kinds of nodes, accounts, QOS, containers, quotas.

Times and sizes are in the units that the names say. ``None`` is "no limit" for a limit, and "could not be found out"
for anything else.
"""

from __future__ import annotations

from pydantic import Field

from hpcaccel.spec.fields import Flag, Natural, Section, Text, Word, words

__all__ = ["UNTYPED", "Account", "Containers", "NodeType", "Partition", "Qos", "Quota", "SiteConfig"]

UNTYPED = "gpu"
"""Stands for the type of GPUs to which a site gave none (``Gres=gpu:4``)."""


class SiteConfig(Section):
    """From ``scontrol show config``, slurm.conf(5)'s names in our spelling."""

    cluster_name: Text = Field(default="", description="ClusterName.")
    max_array_size: Natural | None = Field(
        default=None, description="MaxArraySize: the highest index of an array is one less; 0: no arrays."
    )
    max_job_count: Natural | None = Field(default=None, description="MaxJobCount: jobs of all users at one time.")
    max_batch_requeue: Natural | None = Field(
        default=None, description="MaxBatchRequeue: how often Slurm requeues a job that fails to start."
    )
    kill_wait_seconds: Natural | None = Field(
        default=None, description="KillWait: seconds between SIGTERM and SIGKILL at a limit or a preemption."
    )
    job_requeue: Flag | None = Field(
        default=None,
        description="JobRequeue: whether jobs are requeued that do not say so; sbatch --requeue overrules.",
    )
    expedited_requeue: Flag | None = Field(
        default=None,
        description="Whether sbatch takes --requeue=expedite: from 25.11 on, with enable_expedited_requeue in "
        "SlurmctldParameters.",
    )
    preempt_type: Text | None = Field(
        default=None, description="PreemptType: preempt/none, preempt/partition_prio, preempt/qos."
    )
    preempt_mode: Text | None = Field(
        default=None, description="PreemptMode of the cluster: OFF, CANCEL, REQUEUE, SUSPEND; GANG may stand beside it."
    )
    preempt_exempt_seconds: Natural | None = Field(
        default=None, description="PreemptExemptTime: seconds that a job runs before it can be preempted."
    )
    accounting: Flag | None = Field(
        default=None, description="Whether Slurm keeps accounts (slurmdbd); null: it could not be asked."
    )
    accounting_enforce: list[Word] = words(
        "AccountingStorageEnforce: [associations, limits, qos]; empty: accounts and QOS are not checked."
    )
    enforce_part_limits: Text | None = Field(
        default=None,
        description="EnforcePartLimits: NO: a job beyond a partition's limits waits for good; ALL, ANY: it is refused.",
    )
    select_type: Text | None = Field(default=None, description="SelectType, such as select/cons_tres.")
    select_type_parameters: Text | None = Field(
        default=None, description="SelectTypeParameters: what is handed out, such as CR_CORE_MEMORY."
    )
    over_time_limit_minutes: Natural | None = Field(
        default=None, description="OverTimeLimit: minutes that a job may run beyond its limit; null: without end."
    )
    def_mem_per_node_mb: Natural | None = Field(
        default=None, description="DefMemPerNode: megabytes of a node that a job gets that asks for none."
    )
    def_mem_per_cpu_mb: Natural | None = Field(default=None, description="DefMemPerCPU, in megabytes.")
    max_mem_per_node_mb: Natural | None = Field(default=None, description="MaxMemPerNode, in megabytes.")
    licenses: list[Word] = words("Licences of the cluster, as slurm.conf writes them: [matlab:10].")
    submit_plugins: list[Word] = words("JobSubmitPlugins, which may change or refuse a job.")
    topology: Text | None = Field(default=None, description="TopologyPlugin; --switches needs topology/tree.")


class Partition(Section):
    """From ``scontrol show partition``. Lists that are null allow everybody."""

    name: Word = Field(description="The partition's name.")
    default: Flag = Field(default=False, description="Jobs go here that name no partition.")
    state: Text = Field(default="UP", description="UP, DOWN (jobs wait), DRAIN (no new jobs), INACTIVE.")
    max_time_minutes: Natural | None = Field(default=None, description="MaxTime in minutes; null: no limit.")
    default_time_minutes: Natural | None = Field(
        default=None, description="DefaultTime in minutes; null: that of max_time_minutes."
    )
    max_nodes: Natural | None = Field(default=None, description="MaxNodes of one job; null: no limit.")
    min_nodes: Natural = Field(default=0, description="MinNodes of one job.")
    nodes: Natural = Field(default=0, description="How many nodes the partition has.")
    max_cpus_per_node: Natural | None = Field(default=None, description="MaxCPUsPerNode; null: no limit.")
    max_mem_per_node_mb: Natural | None = Field(
        default=None, description="MaxMemPerNode in megabytes; null: the cluster's."
    )
    def_mem_per_node_mb: Natural | None = Field(default=None, description="DefMemPerNode in megabytes.")
    def_mem_per_cpu_mb: Natural | None = Field(default=None, description="DefMemPerCPU in megabytes.")
    allow_accounts: list[Word] | None = Field(default=None, description="Accounts that may submit here.")
    deny_accounts: list[Word] = words("Accounts that may not; counts only where allow_accounts is null.")
    allow_qos: list[Word] | None = Field(default=None, description="QOS that may be used here.")
    deny_qos: list[Word] = words("QOS that may not; counts only where allow_qos is null.")
    allow_groups: list[Word] | None = Field(default=None, description="Unix groups that may submit here.")
    qos: Text | None = Field(default=None, description="The QOS whose limits hold for the whole partition.")
    preempt_mode: Text | None = Field(
        default=None, description="What happens to jobs of this partition that are preempted: OFF, CANCEL, REQUEUE …"
    )
    grace_seconds: Natural = Field(
        default=0, description="GraceTime: seconds between the SIGTERM of a preemption and the kill."
    )
    priority_tier: Natural = Field(default=1, description="PriorityTier: higher ones preempt and start first.")
    exclusive: Flag = Field(default=False, description="A job gets whole nodes (OverSubscribe=EXCLUSIVE).")
    root_only: Flag = Field(default=False, description="Only root may submit here.")
    reservation_required: Flag = Field(default=False, description="Only jobs of a reservation (ReqResv).")
    over_time_limit_minutes: Natural | None = Field(
        default=None, description="OverTimeLimit of the partition; null: the cluster's."
    )
    node_types: list[Word] = words("Names of the node types in it, see node_types.")


class NodeType(Section):
    """Nodes that are alike: same GPUs, CPUs, memory and features."""

    name: Word = Field(description="A name made from what they have, such as 4xa100-64cpu-500G.")
    gpus: dict[Word, Natural] = Field(
        default_factory=dict, description="GPUs of one node by type, {a100: 4}; gpu stands for those without a type."
    )
    cpus: Natural = Field(default=0, description="CPUs of one node that jobs can have (hardware threads where on).")
    sockets: Natural | None = Field(default=None, description="Sockets of one node.")
    threads_per_core: Natural | None = Field(default=None, description="2: hyper-threads are CPUs to Slurm.")
    memory_mb: Natural = Field(default=0, description="Memory of one node in units of 2**20 bytes.")
    tmp_disk_mb: Natural | None = Field(default=None, description="TmpDisk: node-local disk, same units; null: unsaid.")
    features: list[Word] = words("What --constraint may name.")
    gres: list[Word] = words("Other generic resources of a node, as Slurm writes them: [nvme:1].")
    count: Natural = Field(default=0, description="How many there are.")
    nodes: Text = Field(default="", description="Which, as a host list: n[1-4].")
    states: dict[Word, Natural] = Field(
        default_factory=dict, description="How many were in which state when it was probed: {idle: 3, drained: 1}."
    )

    @property
    def gpu_count(self) -> int:
        """GPUs of one node, of all types."""
        return sum(self.gpus.values())


class Account(Section):
    """One association of the user's, from ``sacctmgr show associations``."""

    account: Word = Field(description="What --account takes.")
    partition: Word | None = Field(default=None, description="The partition that it holds for; null: all.")
    default: Flag = Field(default=False, description="Jobs are charged to it that name no account.")
    qos: list[Word] = words("QOS that may be used with it.")
    default_qos: Word | None = Field(default=None, description="The QOS of a job that names none.")
    max_wall_minutes: Natural | None = Field(default=None, description="MaxWall: the longest time limit of a job.")
    max_jobs: Natural | None = Field(default=None, description="MaxJobs: jobs that run at one time.")
    max_submit: Natural | None = Field(default=None, description="MaxSubmit: jobs in the queue, array tasks counted.")
    max_tres: dict[Word, Text] = Field(
        default_factory=dict, description="MaxTRES of one job, {gres/gpu: 16, node: 4}, as Slurm writes it."
    )
    group_tres: dict[Word, Text] = Field(
        default_factory=dict, description="GrpTRES: of all running jobs of the association together."
    )


class Qos(Section):
    """From ``sacctmgr show qos``; limits that are null are none."""

    name: Word = Field(description="What --qos takes.")
    priority: Natural | None = Field(default=None, description="Priority.")
    max_wall_minutes: Natural | None = Field(default=None, description="MaxWall: the longest time limit of a job.")
    max_jobs: Natural | None = Field(default=None, description="MaxJobsPU: running jobs of one user.")
    max_submit: Natural | None = Field(default=None, description="MaxSubmitPU: jobs of one user in the queue.")
    max_nodes: Natural | None = Field(default=None, description="Most nodes of one job, from MaxTRES.")
    max_tres: dict[Word, Text] = Field(
        default_factory=dict, description="MaxTRES of one job, {gres/gpu: 16}, as Slurm writes it."
    )
    max_tres_per_node: dict[Word, Text] = Field(default_factory=dict, description="MaxTRESPerNode of one job.")
    max_tres_per_user: dict[Word, Text] = Field(default_factory=dict, description="MaxTRESPU of one user's jobs.")
    min_tres: dict[Word, Text] = Field(default_factory=dict, description="MinTRES: the least that a job must ask for.")
    flags: list[Word] = words("Flags, such as DenyOnLimit (too large a job is refused), NoReserve.")
    preempts: list[Word] = words("QOS whose jobs this one preempts, where preempt_type is preempt/qos.")
    preempt_mode: Text | None = Field(
        default=None, description="What happens to its jobs when preempted; cluster: as the cluster says."
    )
    grace_seconds: Natural = Field(default=0, description="GraceTime: seconds between SIGTERM and the kill.")
    preempt_exempt_seconds: Natural | None = Field(default=None, description="PreemptExemptTime in seconds.")


class Containers(Section):
    """What can run a container on the login node; compute nodes are taken to be like it."""

    pyxis: Flag | None = Field(default=None, description="srun knows --container-image; null: it could not be asked.")
    enroot: Text | None = Field(default=None, description="Version of enroot; null: not found.")
    apptainer: Text | None = Field(default=None, description="Version of Apptainer; null: not found.")
    singularity: Text | None = Field(default=None, description="Version of SingularityCE; null: not found.")


class Quota(Section):
    """What a file system lets the user have. null: that number is not known, or not limited."""

    path: Word = Field(description="The directory for which it was asked.")
    source: Text = Field(default="", description="What told: lfs quota, quota, or df (the whole file system).")
    bytes_limit: Natural | None = Field(default=None, description="Bytes that may be used.")
    bytes_used: Natural | None = Field(default=None, description="Bytes in use.")
    inodes_limit: Natural | None = Field(default=None, description="Files and directories that there may be.")
    inodes_used: Natural | None = Field(default=None, description="Files and directories that there are.")
