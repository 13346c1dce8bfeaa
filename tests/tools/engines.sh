#!/usr/bin/env bash
# Installs SLURM (two nodes on this machine), Open MPI and MPICH on Debian, as root, for tests/promises/engines.
# Does nothing if a SLURM runs already.
set -eu
PATH=$PATH:/usr/sbin:/sbin
if command -v sinfo >/dev/null && timeout 20 sinfo >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "No SLURM and MPI: they are installed as root, on Debian" >&2
    exit 1
fi
apt-get update -qq
apt-get install -y -qq slurm-wlm munge openmpi-bin mpich >/dev/null
host=$(hostname -s)
grep -q " node1 " /etc/hosts || echo "127.0.0.1 node1 node2 " >>/etc/hosts
mkdir -p /etc/slurm /var/spool/slurmctld /var/spool/slurmd-node1 /var/spool/slurmd-node2 /run/munge
head -c 1024 /dev/urandom >/etc/munge/munge.key
chown munge: /etc/munge/munge.key /run/munge
chmod 400 /etc/munge/munge.key
su -s /bin/sh munge -c '/usr/sbin/munged -f'
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=tests
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd-%n
SlurmdPidFile=/run/slurmd-%n.pid
SwitchType=switch/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=node1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17001 CPUs=$(nproc) State=UNKNOWN
NodeName=node2 NodeHostname=$host NodeAddr=127.0.0.1 Port=17002 CPUs=$(nproc) State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=node[1-2] MaxTime=INFINITE State=UP PriorityTier=2
CONF
slurmctld
slurmd -N node1
slurmd -N node2
sleep 4
sinfo
