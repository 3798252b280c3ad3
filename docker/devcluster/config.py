"""Contents of slurm.conf, plugstack.conf, gres.conf and slurmdbd.conf.

The man pages of Slurm 22.05 describe the options: slurm.conf(5), spank(7), gres.conf(5) and slurmdbd.conf(5).
"""

from __future__ import annotations

from .state import State

# How long a requeued job waits before it may start again. Slurm's default, 120 s, would slow down every test.
CRED_EXPIRE_SECONDS = 5


def slurm_conf(state: State, *, loopback_only: bool) -> str:
    """Content of slurm.conf.

    `loopback_only` makes Slurm's programs listen only on the address of their own host name, which is 127.0.0.1 on the
    nodes. It must be False for commands outside the nodes if this machine's own name has another address.
    """
    root, options = state.root, state.options
    communication = "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny\n" if loopback_only else ""
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs={options.cpus} Boards=1 "
        f"SocketsPerBoard=1 CoresPerSocket={options.cpus} ThreadsPerCore=1 RealMemory={options.memory_mb}"
        + (f" Gres=gpu:{options.gpus}" if options.gpus else "")
        for name, port in zip(state.nodes, state.ports.slurmd, strict=True)
    )
    conf = state.daemons_conf if loopback_only else state.slurm_conf
    plugins = f"PlugStackConfig={conf.with_name('plugstack.conf')}\n" if state.pyxis else ""
    gres_types = "GresTypes=gpu\n" if options.gpus else ""
    return f"""\
# Written by docker/cluster for {root}; changes are lost at the next `up`.
ClusterName={options.name}
SlurmctldHost={state.controller}(127.0.0.1)
SlurmctldPort={state.ports.slurmctld}
{communication}SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/run/munge.socket,cred_expire={CRED_EXPIRE_SECONDS}

StateSaveLocation={root}/spool/slurmctld
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/%n.log
# The slurm.conf of the daemons and that of users differ in listening addresses and paths: no warnings about that.
DebugFlags=NO_CONF_HASH

ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
MpiDefault=none
ReturnToService=2
PropagateResourceLimits=NONE

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={state.ports.slurmdbd}
# Not a password: with slurmdbd this names munge's socket.
AccountingStoragePass={root}/run/munge.socket

SlurmdTimeout={options.slurmd_timeout_seconds}
SlurmctldTimeout=30
SlurmctldParameters=enable_expedited_requeue
MessageTimeout=30
KillWait={options.kill_wait_seconds}
MinJobAge=300
MaxArraySize=10001
JobRequeue=1

SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

# Lets the configured nodes be larger than this machine. Needed from the first start on: a node that has once
# registered with fewer resources than configured stays INVAL.
SlurmdParameters=config_overrides
{plugins}{gres_types}{nodes}
PartitionName=DEFAULT Nodes=ALL State=UP OverSubscribe=NO DefaultTime=01:00:00 MaxTime=7-00:00:00
PartitionName=gpu Default=YES PriorityTier=10 PreemptMode=REQUEUE GraceTime={options.grace_seconds}
PartitionName=gpu0 PriorityTier=10 PreemptMode=REQUEUE GraceTime=0
PartitionName=gpuc PriorityTier=10 PreemptMode=CANCEL GraceTime={options.grace_seconds}
PartitionName=gpuc0 PriorityTier=10 PreemptMode=CANCEL GraceTime=0
PartitionName=urgent PriorityTier=100 PreemptMode=OFF
"""


def plugstack_conf(state: State) -> str:
    """Content of plugstack.conf. srun and slurmd find it next to slurm.conf, slurmstepd by its path in slurm.conf."""
    return f"required {state.pyxis}/lib/slurm/spank_pyxis.so runtime_path={state.root}/run/pyxis\n"


def gres_conf(state: State) -> str:
    """Content of gres.conf. GPUs must be character devices: for plain files Slurm sets no CUDA_VISIBLE_DEVICES."""
    files = "\n".join(
        f"Name=gpu File={state.root}/dev/nvidia{i} Flags=nvidia_gpu_env" for i in range(state.options.gpus)
    )
    return f"AutoDetect=off\n{files}\n"


def slurmdbd_conf(state: State) -> str:
    root = state.root
    return f"""\
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket
CommunicationParameters=NoInAddrAny
DbdHost={state.controller}
DbdAddr=127.0.0.1
DbdPort={state.ports.slurmdbd}
SlurmUser=root
LogFile={root}/log/slurmdbd.log
PidFile={root}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""
