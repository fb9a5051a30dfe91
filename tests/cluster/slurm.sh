#!/bin/bash
# Slurm over the pretended hosts h1 to hN, after `hosts.sh up N`: slurm.sh up N. Prints SLURM_CONF=... for
# `hosts.sh on h1 env SLURM_CONF=... sbatch ...`. It ends with `hosts.sh down`. Needs slurm-wlm and munge; for
# `srun --mpi=pmix` libpmix-dev too.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
dir=${HOSTS_DIR:?as for hosts.sh}
[ "${1:-}" = up ] || { sed -n 2,4p "$0" | cut -c3- >&2; exit 2; }
n=${2:-2}
conf=$dir/slurm; mkdir -p "$conf"
[ -s "$conf/munge.key" ] || head -c 1024 /dev/urandom >"$conf/munge.key"
echo CgroupAutomount=no >"$conf/cgroup.conf"
cat >"$conf/slurm.conf" <<EOF
ClusterName=pretended
SlurmctldHost=h1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
StateSaveLocation=/tmp/slurm/state
SlurmdSpoolDir=/tmp/slurm/spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/tmp/slurm/ctld.log
SlurmdLogFile=/tmp/slurm/d.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=5
EOF
hosts=$(seq -s, -f 'h%g' "$n")
for k in $(seq "$n"); do echo "NodeName=h$k NodeAddr=10.77.0.$k CPUs=4 State=UNKNOWN" >>"$conf/slurm.conf"; done
echo "PartitionName=all Nodes=$hosts Default=YES MaxTime=INFINITE State=UP" >>"$conf/slurm.conf"
export SLURM_CONF=$conf/slurm.conf
for k in $(seq "$n"); do
  "$here/hosts.sh" on "h$k" bash -c "mkdir -p /tmp/slurm/state /tmp/slurm/spool /run/munge /run/mung; chmod 755 /run/munge; chmod 700 /run/mung
    install -m 400 $conf/munge.key /run/mung/key
    munged --force --key-file=/run/mung/key --socket=/run/munge/munge.socket.2 --pid-file=/run/mung/pid --log-file=/tmp/slurm/munge.log --seed-file=/run/mung/seed
    munge -n | unmunge >/dev/null"
done
"$here/hosts.sh" on h1 slurmctld; sleep 1
for k in $(seq "$n"); do "$here/hosts.sh" on "h$k" slurmd; done
sleep 2
"$here/hosts.sh" on h1 sinfo -N -l >&2
echo "SLURM_CONF=$SLURM_CONF"
