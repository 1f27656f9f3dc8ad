#!/usr/bin/env bash
# Run a training script on hosts that may come and go. On every host, at any time, all with the same JOB and NNODES:
#
#   ETCD=10.0.0.1:2379 JOB=run-7 NNODES=1:4 NPROC=2 launch/elastic.sh train.py [script arguments]
#
# ETCD     ip:port (or name:port) of an etcd server, where the launchers meet. The same everywhere.
# JOB      a name that no other job on that server has, and no earlier one. The same everywhere.
# NNODES   least and most number of hosts, as 1:4. The same everywhere.
# NPROC    processes on this host, on the CPU over gloo;  or
# GPUS     one process per GPU: "0,1,..." or "all". Exactly one of NPROC and GPUS.
# IFNAME   the network interface to use, such as ib0. Default: the one that leads to ETCD.
# HOST_IP  this host's address as the others see it. Default: that of IFNAME.
# TIMEOUT  seconds to wait for further hosts when some came or went; at least 10, which is the lease. Default: 12.
# STARTS   how often in a row the launcher may end within ten minutes before it is given up. Default: 20.
# LOG_DIR  default: log/elastic-HOST_IP. One for each host, also for two on one machine.
# PYTHON   default: python. It needs paddle_shard[elastic].
#
# The script saves with paddle_shard.Checkpoints, and leaves with exit code 0 only when it has trained to its end.
# Whatever else ends a rank, all ranks of all hosts are started again; so is the launcher, if it ends with them, or if
# its host was frozen for longer than its lease. SIGTERM and Ctrl-C end this host's part of the job: its ranks get a
# SIGTERM and 30 seconds to save.
set -euo pipefail

wrong() {
  echo "elastic.sh: $*" >&2
  exit 2
}

for variable in ETCD JOB NNODES; do
  [[ -n ${!variable:-} ]] || wrong "$variable is not set; the top of this file says what it is"
done
PYTHON=${PYTHON:-python}
TIMEOUT=${TIMEOUT:-12}
STARTS=${STARTS:-20}
[[ $ETCD =~ ^[^:]+:[0-9]+$ ]] || wrong "ETCD must be ip:port, got '$ETCD'"
[[ $JOB =~ ^[A-Za-z0-9_.-]+$ && $JOB != default ]] || wrong "JOB must be letters, digits, '_', '.' and '-', got '$JOB'"
[[ $NNODES =~ ^([1-9][0-9]*):([1-9][0-9]*)$ ]] && ((BASH_REMATCH[1] < BASH_REMATCH[2])) ||
  wrong "NNODES must be least:most, as 1:4, got '$NNODES'; for a fixed number of hosts there is hosts.sh"
[[ $TIMEOUT =~ ^[0-9]+$ ]] && ((TIMEOUT >= 10)) || wrong "TIMEOUT must be at least 10, got '$TIMEOUT'"
[[ $STARTS =~ ^[1-9][0-9]*$ ]] || wrong "STARTS must be at least 1, got '$STARTS'"
[[ -n ${NPROC:-} && -z ${GPUS:-} || -z ${NPROC:-} && -n ${GPUS:-} ]] || wrong "set NPROC (CPU) or GPUS, one of them"
(($# > 0)) || wrong "no training script given"
[[ -f $1 ]] || wrong "script '$1' is not a file, seen from $PWD"

# etcd3's generated code is older than today's protobuf, which reads it in Python only.
export PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python

# Whether the server answers, and this host's address and interface, as in hosts.sh.
addresses=$("$PYTHON" - "$ETCD" "${HOST_IP:-}" "${IFNAME:-}" <<'EOF'
import contextlib
import fcntl
import socket
import struct
import sys

try:
    import etcd3
except ImportError:
    sys.exit("elastic.sh: the launcher needs etcd3: pip install 'paddle_shard[elastic]'")

(server, host_ip, interface) = sys.argv[1:]
host, port = server.split(":")
try:
    etcd3.client(host=host, port=int(port), timeout=10).status()
except Exception as error:
    sys.exit(f"elastic.sh: no etcd server answers at ETCD={server} ({type(error).__name__}); launch/README.md says how "
             "to start one")
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ip_of = {}
for _, name in socket.if_nameindex():
    with contextlib.suppress(OSError):  # has no address
        answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
        ip_of[name] = socket.inet_ntoa(answer[20:24])
if interface and interface not in ip_of:
    sys.exit(f"elastic.sh: IFNAME={interface} is no interface with an address; this host has {ip_of}")
if not host_ip and interface:
    host_ip = ip_of[interface]
elif not host_ip:
    probe.connect((socket.gethostbyname(host), 1))  # sends nothing: the routing table chooses the address
    host_ip = probe.getsockname()[0]
interface = interface or next((name for name, ip in ip_of.items() if ip == host_ip), "")
if not interface:
    sys.exit(f"elastic.sh: no interface has HOST_IP={host_ip} as its first address: {ip_of}; pass IFNAME too")
print(host_ip, interface)
EOF
) || exit 2
read -r HOST_IP IFNAME <<<"$addresses"
LOG_DIR=${LOG_DIR:-log/elastic-$HOST_IP}

export GLOO_SOCKET_IFNAME=$IFNAME
# What an operator or another job has set would win over the launcher's arguments.
unset "${!PADDLE_TRAINER@}" "${!PADDLE_ELASTIC@}" PADDLE_MASTER PADDLE_NNODES PADDLE_RANK PADDLE_NPROC_PER_NODE \
  PADDLE_DEVICES PADDLE_JOB_ID PADDLE_MAX_RESTART PADDLE_LOG_DIR PADDLE_IPS POD_IP DISTRIBUTED_TRAINER_ENDPOINTS

if [[ -n ${NPROC:-} ]]; then
  [[ $NPROC =~ ^[1-9][0-9]*$ ]] || wrong "NPROC must be at least 1, got '$NPROC'"
  ranks=(--nproc_per_node "$NPROC")
  export CUDA_VISIBLE_DEVICES=all # names no device: CUDA shows none and the launcher takes gloo
  cores=$(nproc)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
else
  "$PYTHON" -c 'import sys, paddle; sys.exit(paddle.device.cuda.device_count() == 0)' ||
    wrong "GPUS=$GPUS, but Paddle sees no GPU on this host"
  ranks=()
  [[ $GPUS == all ]] || ranks=(--devices "$GPUS")
fi

# Starts the launcher, again and again; it knows its processes by what they have in their environment.
supervisor=$(
  cat <<'EOF'
import glob
import os
import signal
import subprocess
import sys
import time

import etcd3

server, job, log_dir, starts, *command = sys.argv[1:]
host, port = server.split(":")
mark = f"PADDLE_SHARD_ELASTIC={job}-{os.getpid()}-{time.time()}"
launcher, stopping = None, []


def say(text):
    print(f"elastic.sh: {text}", file=sys.stderr, flush=True)


def stop(number, _):
    stopping.append(number)
    if launcher is not None:
        launcher.terminate()  # it gives its ranks 30 seconds


def asked(question):
    """What etcd answers; None if it does not."""
    try:
        client = etcd3.client(host, int(port), timeout=5)
        try:
            return question(client)
        finally:
            client.close()
    except Exception:
        return None


def left():
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                if mark.encode() in file.read().split(b"\0"):
                    found.append(int(path.split("/")[2]))
        except OSError:
            continue  # it has ended, or is another user's
    return found


def end(seconds):
    """End what is left of this host: a rank that stays would train beside those that come."""
    number, until = signal.SIGTERM, time.monotonic() + seconds
    told = set()
    while pids := left():
        if time.monotonic() >= until:
            number, told = signal.SIGKILL, set()
        for pid in set(pids) - told:
            told.add(pid)
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        time.sleep(0.1)


def lost(began):
    """Wait for the launcher; True if it must be ended, because etcd does not know this host any more.

    It renews its lease every 5 seconds, and never gets back one that it has lost while its host was frozen. Then it
    would train alone beside the others. Between two worlds, no host is known for up to 5 seconds.
    """
    looked, missed = time.monotonic(), 0
    while launcher.poll() is None:
        time.sleep(1)
        looked, before = time.monotonic(), looked
        if looked - before > 10:
            return True
        pods = [path for path in glob.glob(f"{log_dir}/{job}.*.log") if os.path.getmtime(path) >= began]
        if not pods or stopping:
            continue  # it has not met the others yet, or leaves them
        pod = max(pods, key=os.path.getmtime)[: -len(".log")].rpartition(".")[2]
        known = asked(lambda client: [value.decode() for value, _ in client.get_prefix(f"/paddle/{job}/heartbeat")])
        missed = 0 if known is None or pod in known else missed + 1
        if missed >= 15:
            return True
    return False


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
in_a_row = 0
while not stopping:
    began, name_value = time.time(), mark.split("=")
    # In a session of its own, so that Ctrl-C comes to the ranks once, and by the launcher.
    launcher = subprocess.Popen(command, env={**os.environ, name_value[0]: name_value[1]}, start_new_session=True)
    if lost(began):
        say("etcd does not know this host any more, which was frozen or cut off: its ranks are killed")
        end(0)
    code = launcher.wait()
    end(30)
    status = asked(lambda client: (client.get(f"/paddle/{job}")[0] or b"").decode())
    if stopping:
        break
    if code == 0 and status in ("completed", None):  # it also ends with 0 if too few hosts came
        sys.exit(0)
    in_a_row = in_a_row + 1 if time.time() - began < 600 else 1
    if in_a_row >= int(starts):
        say(f"the launcher has ended {in_a_row} times in a row (exit code {code}); see {log_dir}/workerlog.*")
        sys.exit(code or 1)
    say(f"the launcher ended with exit code {code}; it is started again")
    time.sleep(1)
sys.exit(128 + stopping[0])
EOF
)

mkdir -p "$LOG_DIR"
rm -f "$LOG_DIR"/workerlog.* # the launcher appends
exec "$PYTHON" -u -c "$supervisor" "$ETCD" "$JOB" "$LOG_DIR" "$STARTS" \
  "$PYTHON" -u -m paddle.distributed.launch \
  --master "etcd://$ETCD" --nnodes "$NNODES" --host "$HOST_IP" --job_id "$JOB" \
  --elastic_level 1 --elastic_timeout "$TIMEOUT" --max_restart 3 \
  ${ranks[@]+"${ranks[@]}"} --log_dir "$LOG_DIR" "$@"
