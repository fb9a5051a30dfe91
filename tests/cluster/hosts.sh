#!/bin/bash
# Pretended hosts on one Linux machine, as separate as its kernel allows: each has a network, host name, process table,
# /tmp, /run, /dev/shm, IPC and ~/.ssh of its own, and an sshd. They share the rest of the file system, as a cluster's
# nodes share NFS. Nothing touches the machine's own network. Needs root, iproute2, util-linux, openssh-server.
#
#   hosts.sh up 2            h1, h2 at 10.77.0.1, .2
#   hosts.sh on h1 CMD...    runs CMD on h1, in the present folder, with the present environment
#   hosts.sh ps h2           what runs there, but for its init and sshd
#   hosts.sh cut h2          its network goes down;  `heal h2`: up again
#   hosts.sh kill h2         all of it is gone at once (a power cut)
#   hosts.sh down            everything is gone
# HOSTS_DIR: a folder of theirs, which is made. KEEP: folders under /tmp that the hosts see as well, space-separated.
set -eu
dir=${HOSTS_DIR:?a folder for what belongs to the hosts}
keep=${KEEP:-}
net=10.77.0

pid() { cat "$dir/$1.pid"; }  # of the host's init, as seen from outside

wait_for() { for _ in {1..100}; do "$@" >/dev/null 2>&1 && return; sleep 0.05; done; echo "no: $*" >&2; return 1; }

inside() {  # the init of host $1
  hostname "$1"
  mount --make-rprivate /
  mount -t tmpfs tmpfs /mnt
  for path in "$dir" $keep; do mkdir -p "/mnt$path"; mount --bind "$path" "/mnt$path"; done
  mount --rbind /mnt/tmp /tmp
  chmod 1777 /tmp
  mount -t tmpfs -o size=2g tmpfs /dev/shm
  mount -t tmpfs tmpfs /run
  mkdir -p /run/sshd /root/.ssh
  mount --bind "$dir/ssh" /root/.ssh
  mount --bind "$dir/etc_hosts" /etc/hosts
  ip link set lo up
  until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
  ip addr add "$net.${1#h}/24" dev eth0
  ip link set eth0 up
  /usr/sbin/sshd -f "$dir/sshd_config"
  touch "$dir/$1.ready"
  while :; do sleep 1000 || :; done  # bash reaps orphans meanwhile
}

start() {  # $1 name; the new process is remembered by its pid outside
  setsid "${@:2}" </dev/null >>"$dir/$1.log" 2>&1 &
  echo $! >"$dir/$1.outer"
}

up() {
  [ ! -e "$dir" ] || { echo "there are hosts already: $dir" >&2; exit 1; }
  mkdir -p "$dir/ssh"
  ssh-keygen -q -t ed25519 -N '' -f "$dir/ssh/id_ed25519"
  ssh-keygen -q -t ed25519 -N '' -f "$dir/host_key"
  cp "$dir/ssh/id_ed25519.pub" "$dir/ssh/authorized_keys"
  printf 'StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n' >"$dir/ssh/config"
  chmod 700 "$dir/ssh"; chmod 600 "$dir"/ssh/*
  printf '%s\n' "HostKey $dir/host_key" 'PermitRootLogin yes' 'StrictModes no' 'UsePAM no' 'PidFile none' >"$dir/sshd_config"
  echo '127.0.0.1 localhost' >"$dir/etc_hosts"
  for k in $(seq "$1"); do echo "$net.$k h$k" >>"$dir/etc_hosts"; done
  start switch unshare --net --fork --kill-child sleep infinity
  wait_for pgrep -P "$(cat "$dir/switch.outer")"
  pgrep -P "$(cat "$dir/switch.outer")" >"$dir/switch.pid"
  in_switch="nsenter -t $(pid switch) -n"
  $in_switch ip link add br0 type bridge
  $in_switch ip link set br0 up
  for k in $(seq "$1"); do
    start "h$k" unshare --net --uts --ipc --pid --mount --fork --mount-proc --kill-child "$0" inside "h$k"
    wait_for pgrep -P "$(cat "$dir/h$k.outer")"
    pgrep -P "$(cat "$dir/h$k.outer")" >"$dir/h$k.pid"
    $in_switch ip link add "h$k" type veth peer name eth0 netns "$(pid "h$k")"
    $in_switch ip link set "h$k" master br0 up
  done
  for k in $(seq "$1"); do wait_for test -e "$dir/h$k.ready" || cat "$dir/h$k.log" >&2; done
}

down() {
  for file in "$dir"/*.outer; do [ ! -e "$file" ] || kill -9 "$(cat "$file")" 2>/dev/null || :; done  # it blocks SIGTERM
  sleep 0.3
  rm -rf "$dir"
}

case ${1:-} in
  up) up "${2:-2}" ;;
  down) down ;;
  inside) inside "$2" ;;
  on) name=$2; shift 2; exec nsenter -t "$(pid "$name")" -n -u -i -p -m --wdns="$PWD" -- "$@" ;;
  ps) nsenter -t "$(pid "$2")" -p -m ps -eo pid,ppid,stat,args | grep -vE 'hosts.sh inside|sshd: /usr|sleep 1000|ps -eo|PPID' || : ;;
  cut) nsenter -t "$(pid switch)" -n ip link set "$2" down ;;
  heal) nsenter -t "$(pid switch)" -n ip link set "$2" up ;;
  kill) kill -9 "$(pid "$2")" ;;
  *) sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3- >&2; exit 2 ;;
esac
