"""The files of the test cluster, as pure functions of its shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """What the cluster looks like. Leaves are consecutive: 8 nodes in 2 leaves are leaf0 = n[0-3],
    leaf1 = n[4-7]."""

    nodes: int = 8
    gpus: int = 8
    gpu_type: str = "h100"
    leaves: int = 2
    topology: str = "tree"  # or "block", on a Slurm that has it: one block a leaf
    accounting: bool = False
    slurmd_timeout_s: int = 15
    kill_wait_s: int = 5
    grace_s: int = 20  # notice of a preempted job
    min_job_age_s: int = 300  # how long the controller remembers ended jobs
    max_jobs: int = 1000  # of the whole cluster: a low number is how "queue full" is tested
    cpus: int = 16
    memory_mib: int = 16000

    @property
    def names(self) -> list[str]:
        return [f"n{i}" for i in range(self.nodes)]

    def leaf(self, index: int) -> list[str]:
        size = self.nodes // self.leaves
        return self.names[index * size : (index + 1) * size]


@dataclass(frozen=True)
class Ports:
    ctld: int
    dbd: int
    slurmd: list[int] = field(default_factory=list)


def slurm_conf(shape: Shape, home: Path, host: str, ports: Ports) -> str:
    accounting = f"""
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={ports.dbd}
AccountingStoragePass={home}/munge/socket
AccountingStorageEnforce=associations,limits
JobAcctGatherType=jobacct_gather/linux"""
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        for name, port in zip(shape.names, ports.slurmd, strict=True)
    )
    span = f"n[0-{shape.nodes - 1}]"
    return f"""ClusterName=orchtest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports.ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool/%n
SlurmctldPidFile={home}/run/slurmctld.pid
SlurmdPidFile={home}/run/slurmd-%n.pid
SlurmctldLogFile={home}/log/slurmctld.log
SlurmdLogFile={home}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
TopologyPlugin=topology/{shape.topology}
GresTypes=gpu
MessageTimeout=30
JobRequeue=1
KillWait={shape.kill_wait_s}
SlurmdTimeout={shape.slurmd_timeout_s}
SlurmctldTimeout=10
MinJobAge={shape.min_job_age_s}
MaxJobCount={shape.max_jobs}
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{accounting if shape.accounting else ""}
NodeName=DEFAULT CPUs={shape.cpus} SocketsPerBoard=2 CoresPerSocket={shape.cpus // 2} ThreadsPerCore=1 \
RealMemory={shape.memory_mib} Gres=gpu:{shape.gpu_type}:{shape.gpus} Feature=testbed State=UNKNOWN
{nodes}
PartitionName=main Nodes={span} Default=YES MaxTime=1-0 DefaultTime=30 State=UP PriorityTier=1 \
PreemptMode=REQUEUE GraceTime={shape.grace_s}
PartitionName=urgent Nodes={span} MaxTime=1-0 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes={span} MaxTime=1 DefaultTime=1 State=UP PriorityTier=1 PreemptMode=OFF
"""


def gres_conf(shape: Shape, home: Path) -> str:
    files = f"{home}/dev/gpu[0-{shape.gpus - 1}]" if shape.gpus > 1 else f"{home}/dev/gpu0"
    return f"NodeName=n[0-{shape.nodes - 1}] Name=gpu Type={shape.gpu_type} File={files}\n"


def topology_conf(shape: Shape) -> str:
    leaves = [f"leaf{i}" for i in range(shape.leaves)]
    if shape.topology == "block":
        lines = [
            f"BlockName={leaf} Nodes={','.join(shape.leaf(i))}" for i, leaf in enumerate(leaves)
        ]
        return "\n".join([*lines, f"BlockSizes={shape.nodes // shape.leaves}"]) + "\n"
    lines = [f"SwitchName={leaf} Nodes={','.join(shape.leaf(i))}" for i, leaf in enumerate(leaves)]
    return "\n".join([*lines, f"SwitchName=spine Switches={','.join(leaves)}"]) + "\n"


def cgroup_conf(v1: bool, later: bool = False) -> str:
    if later:  # 23.11 and later can do without
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=cgroup/v1\n" if v1 else "CgroupPlugin=autodetect\nIgnoreSystemd=yes\n"


def slurmdbd_conf(home: Path, ports: Ports) -> str:
    return f"""AuthType=auth/munge
AuthInfo=socket={home}/munge/socket
DbdHost=localhost
DbdPort={ports.dbd}
SlurmUser=root
PidFile={home}/run/slurmdbd.pid
LogFile={home}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
"""
