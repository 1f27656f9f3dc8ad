#!/usr/bin/env bash
# Run a training script on several hosts. On every host, each with its own RANK, in any order:
#
#   MASTER=10.0.0.1:6170 NNODES=2 RANK=0 NPROC=2 launch/hosts.sh train.py [script arguments]
#
# MASTER   ip:port (or name:port) of one of the hosts, free on it; the launchers meet there. The same everywhere.
# NNODES   number of hosts.
# RANK     this host's number, 0 .. NNODES-1, each used once. Global ranks follow it.
# NPROC    processes on this host, on the CPU over gloo;  or
# GPUS     one process per GPU: "0,1,..." or "all". Exactly one of NPROC and GPUS.
# IFNAME   the network interface to use, such as ib0. Default: the one that leads to MASTER.
# HOST_IP  this host's address as the others see it. Default: that of IFNAME.
# LOG_DIR  default: log/host-RANK, so that hosts on one file system do not write the same files.
# PYTHON   default: python.
#
# The output is the launcher's, with that of the host's first rank. Every rank's is in LOG_DIR/workerlog.<k>.
set -euo pipefail

wrong() {
  echo "hosts.sh: $*" >&2
  exit 2
}

for variable in MASTER NNODES RANK; do
  [[ -n ${!variable:-} ]] || wrong "$variable is not set; the top of this file says what it is"
done
PYTHON=${PYTHON:-python}
LOG_DIR=${LOG_DIR:-log/host-$RANK}
[[ $MASTER =~ ^[^:]+:[0-9]+$ ]] || wrong "MASTER must be ip:port, got '$MASTER'"
[[ $NNODES =~ ^[1-9][0-9]*$ ]] || wrong "NNODES must be at least 1, got '$NNODES'"
[[ $RANK =~ ^[0-9]+$ ]] && ((RANK < NNODES)) || wrong "RANK must be 0 .. $((NNODES - 1)), got '$RANK'"
[[ -n ${NPROC:-} && -z ${GPUS:-} || -z ${NPROC:-} && -n ${GPUS:-} ]] || wrong "set NPROC (CPU) or GPUS, one of them"
(($# > 0)) || wrong "no training script given"
[[ -f $1 ]] || wrong "script '$1' is not a file, seen from $PWD"

# Three addresses: MASTER's as a number, because the host that serves it knows itself by comparing strings; this
# host's, because the launcher would take what its host name means, often 127.0.0.1; and the interface of that.
addresses=$("$PYTHON" - "${MASTER%:*}" "${HOST_IP:-}" "${IFNAME:-}" <<'EOF'
import contextlib
import fcntl
import socket
import struct
import sys

master, host_ip, interface = sys.argv[1:]
try:
    master_ip = socket.gethostbyname(master)
except OSError as error:
    sys.exit(f"hosts.sh: MASTER's host {master!r} is unknown here ({error}); pass its IP address")
if master_ip.startswith("127.") and master != master_ip:
    sys.exit(f"hosts.sh: {master!r} means {master_ip} on this host; pass the IP address that the others see")
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ip_of = {}
for _, name in socket.if_nameindex():
    with contextlib.suppress(OSError):  # has no address
        answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
        ip_of[name] = socket.inet_ntoa(answer[20:24])
if interface and interface not in ip_of:
    sys.exit(f"hosts.sh: IFNAME={interface} is no interface with an address; this host has {ip_of}")
if not host_ip and interface:
    host_ip = ip_of[interface]
elif not host_ip:
    probe.connect((master_ip, 1))  # sends nothing: the routing table chooses the address
    host_ip = probe.getsockname()[0]
interface = interface or next((name for name, ip in ip_of.items() if ip == host_ip), "")
if not interface:
    sys.exit(f"hosts.sh: no interface has HOST_IP={host_ip} as its first address: {ip_of}; pass IFNAME too")
print(master_ip, host_ip, interface)
EOF
) || exit 2
read -r master_ip HOST_IP IFNAME <<<"$addresses"

# Without it gloo binds to the address of the host's name, and the ranks of other hosts do not find it.
export GLOO_SOCKET_IFNAME=$IFNAME
# Any of these in the environment would win over the arguments below.
unset "${!PADDLE_TRAINER@}" "${!PADDLE_ELASTIC@}" PADDLE_MASTER PADDLE_NNODES PADDLE_RANK PADDLE_NPROC_PER_NODE \
  PADDLE_DEVICES PADDLE_JOB_ID PADDLE_MAX_RESTART PADDLE_LOG_DIR PADDLE_IPS POD_IP DISTRIBUTED_TRAINER_ENDPOINTS

if [[ -n ${NPROC:-} ]]; then
  [[ $NPROC =~ ^[1-9][0-9]*$ ]] || wrong "NPROC must be at least 1, got '$NPROC'"
  ranks=(--nproc_per_node "$NPROC")
  export CUDA_VISIBLE_DEVICES=all # names no device: CUDA shows none and the launcher takes gloo
  cores=$(nproc)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
else
  # The launcher would start one process on the CPU.
  "$PYTHON" -c 'import sys, paddle; sys.exit(paddle.device.cuda.device_count() == 0)' ||
    wrong "GPUS=$GPUS, but Paddle sees no GPU on this host"
  ranks=()
  [[ $GPUS == all ]] || ranks=(--devices "$GPUS")
fi

mkdir -p "$LOG_DIR"
rm -f "$LOG_DIR"/workerlog.* # the launcher appends
exec "$PYTHON" -u -m paddle.distributed.launch \
  --master "$master_ip:${MASTER##*:}" --nnodes "$NNODES" --rank "$RANK" --host "$HOST_IP" \
  ${ranks[@]+"${ranks[@]}"} --log_dir "$LOG_DIR" "$@"
