"""How do I run a training script on N processes of a Ray cluster, which has no launcher of Paddle's?

On CPUs, over gloo, or on GPUs, one process each:

    python launch/on_ray.py --processes 8 train.py [script arguments]
    python launch/on_ray.py --processes 8 --gpus train.py [script arguments]

Run it on a node of the cluster (`RAY_ADDRESS`, or the cluster of this host). Each rank is a process of its own beside
an actor, which takes `--cpus` CPUs, and a GPU with `--gpus`. Ranks of a node follow each other. All ranks start
together, once there is room for all; each is told what Paddle's launcher tells. The script and its directory must be
there on every node, at the same path, and so must be the folder in which you type this: ranks run in it, so relative
paths are those that you see. `--working-dir .` sends a folder instead, and the ranks run in that.

Global rank 0's output is copied to the terminal as it comes. When a rank fails, all are killed, the end of each
one's output is shown, and the exit code is that of the first to fail; 130 after Ctrl-C, 2 for wrong arguments, and 0
only if every rank ended well. Needs Linux, Ray, and Paddle for the script. (Not called ray.py: `import ray` would
find that.)
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import time
from typing import Any

# if the cluster has none, set RAY_AUTH_MODE=disabled
os.environ.setdefault("RAY_AUTH_MODE", "token")

POLL_SECONDS = 0.2
CONNECT_SECONDS = 10.0
SHOWN_BYTES = 8000
"""Bytes of a rank's output that are shown when one has failed."""


NOTHING = 1 << 62
"""An offset that no output reaches."""


class Rank:
    """A rank's process, on whichever node its actor is."""

    def where(self, ports: int) -> tuple[str, list[int], list[str]]:
        """Return the address of the node, some free ports, and the GPUs that Ray has given."""
        import ray

        probes = [socket.socket() for _ in range(ports)]
        try:
            for probe in probes:
                probe.bind(("", 0))
            free = [probe.getsockname()[1] for probe in probes]
        finally:
            for probe in probes:
                probe.close()
        return (
            ray.util.get_node_ip_address(),
            free,
            list(map(str, ray.get_gpu_ids())),
        )

    def start(
        self,
        command: list[str],
        variables: dict[str, str],
        ip: str,
        folder: str | None,
    ) -> None:
        """Start the script in a folder, None: in the actor's own. It is killed if this actor dies."""
        import ctypes
        import subprocess
        import tempfile
        import threading

        if folder is not None and not os.path.isdir(folder):
            raise NotADirectoryError(f"node {ip} has no {folder}")

        ours = (
            "PADDLE_",
            "POD_",
            "TRAINER_",
            "FLAGS_selected_",
            "RAY_JOB_",
            "RAY_RAYLET_",
        )
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(ours)
        } | variables
        if "GLOO_SOCKET_IFNAME" not in env and (interface := _interface_of(ip)):
            env["GLOO_SOCKET_IFNAME"] = (
                # gloo would take what the host's name means, often 127.0.0.1
                interface
            )
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        kill_with_parent = ctypes.CDLL(None).prctl
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: kill_with_parent(1, signal.SIGKILL),
        )
        self._ended = float("inf")
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self._process.wait()
        self._ended = time.time()

    def look(self, offset: int) -> tuple[bytes, int | None, float]:
        """Return the output from an offset on (from the end, if negative), the exit code, None while it runs, and when
        it ended."""
        code = self._process.returncode if self._ended < float("inf") else None
        size = os.fstat(self._log.fileno()).st_size
        first = max(0, size + offset) if offset < 0 else offset
        return (
            os.pread(self._log.fileno(), max(0, size - first), first),
            code,
            self._ended,
        )

    def stop(self) -> None:
        """Kill the process, and those that it has started."""
        import contextlib

        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _interface_of(ip: str) -> str | None:
    """Return the network interface that has an address."""
    import contextlib
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                # SIOCGIFADDR
                answer = fcntl.ioctl(
                    probe, 0x8915, struct.pack("256s", name.encode())
                )
                if socket.inet_ntoa(answer[20:24]) == ip:
                    return name
    return None


def main() -> int:
    """Run the script that the command line names and return the exit code of the run."""
    options = parse_arguments()
    address = os.environ.get("RAY_ADDRESS", "")
    if found := re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address):
        try:  # Ray itself would try for minutes
            socket.create_connection(
                (found[1], int(found[2])), CONNECT_SECONDS
            ).close()
        except OSError as error:
            say(
                f"no Ray cluster answers at RAY_ADDRESS={address} ({error}). Start one there, or correct or unset it"
            )
            return 2
    try:
        import ray
    except ImportError as error:
        say(
            f"Ray cannot be imported ({error}); install it with: pip install 'paddle_shard[ray]'"
        )
        return 2
    received: list[int] = []
    runtime_env = (
        {"working_dir": options.working_dir} if options.working_dir else None
    )
    try:
        ray.init(address="auto", runtime_env=runtime_env, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        say(
            f"no Ray cluster: {error}. Start one with: ray start --head; or correct RAY_ADDRESS, or unset it"
        )
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        ranks = placed(options, received)
        return (
            128 + received[0]
            if ranks is None
            else run(options, ranks, received)
        )
    finally:
        ray.shutdown()  # and with it all actors and their ranks


def parse_arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        prog="on_ray.py",
        usage="on_ray.py --processes N [--gpus] [--cpus C] [--working-dir DIR] script [script arguments]",
        description="Run a training script on N processes of a Ray cluster.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=int, required=True, metavar="N", help="ranks in all"
    )
    parser.add_argument(
        "--gpus",
        action="store_true",
        help="one GPU for each rank; else they run on CPUs, over gloo",
    )
    parser.add_argument(
        "--cpus",
        type=float,
        default=1,
        metavar="C",
        help="CPUs for each rank; default: %(default)s",
    )
    parser.add_argument(
        "--working-dir",
        metavar="DIR",
        help="a directory to send to the nodes, in which ranks run",
    )
    parser.add_argument("script", help="a .py file")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="passed on to the script"
    )
    options = parser.parse_args()
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    if options.working_dir is None:
        if not os.path.isfile(options.script):
            parser.error(
                f"script {options.script!r} is not a file, seen from {os.getcwd()}"
            )
        options.script = os.path.abspath(options.script)
    elif not os.path.isfile(os.path.join(options.working_dir, options.script)):
        parser.error(
            f"script {options.script!r} is not a file in --working-dir {options.working_dir}"
        )
    return options


def placed(
    options: argparse.Namespace, received: list[int]
) -> list[Any] | None:
    """Return an actor for each rank, once there is room for all of them; None if a signal came before."""
    import ray

    bundle = {"CPU": options.cpus} | ({"GPU": 1} if options.gpus else {})
    group = ray.util.placement_group(
        [bundle] * options.processes, strategy="PACK"
    )
    said = time.monotonic() + 10
    while not ray.wait([group.ready()], timeout=POLL_SECONDS)[0]:
        if received:
            return None
        if time.monotonic() > said:
            there = ray.cluster_resources()
            has = (
                f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"
            )
            say(
                f"waiting for room for {options.processes} x {bundle}; the cluster has {has}"
            )
            said = float("inf")
    at = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    made = ray.remote(Rank)
    return [
        made.options(
            num_cpus=options.cpus,
            num_gpus=int(options.gpus),
            scheduling_strategy=at(group, placement_group_bundle_index=k),
        ).remote()
        for k in range(options.processes)
    ]


def told(
    options: argparse.Namespace, ranks: list[Any]
) -> tuple[list[Any], list[dict[str, str]], list[str]]:
    """Return the actors in the order of their ranks, with what Paddle's launcher tells each, and their addresses."""
    import ray

    found = list(
        zip(
            ray.get([rank.where.remote(2) for rank in ranks]),
            ranks,
            strict=True,
        )
    )
    found.sort(
        key=lambda one: (
            tuple(map(int, one[0][0].split(".")))
            if one[0][0].count(".") == 3
            else one[0][0]
        )
    )
    ips = [ip for (ip, _, _), _ in found]
    endpoints = [f"{ip}:{ports[0]}" for (ip, ports, _), _ in found]
    master, variables = f"{ips[0]}:{found[0][0][1][1]}", []
    for rank, ((ip, _, gpus), _) in enumerate(found):
        local = ips[:rank].count(ip)
        mine = {
            "PADDLE_MASTER": master,
            "PADDLE_GLOBAL_SIZE": str(len(ips)),
            "PADDLE_LOCAL_SIZE": str(ips.count(ip)),
            "PADDLE_GLOBAL_RANK": str(rank),
            "PADDLE_LOCAL_RANK": str(local),
            "PADDLE_NNODES": str(len(set(ips))),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(len(ips)),
            "PADDLE_RANK_IN_NODE": str(local),
            "PADDLE_AUTO_CLUSTER": "0",
        }
        if options.gpus:  # the only one that it sees
            mine |= {
                "CUDA_VISIBLE_DEVICES": gpus[0],
                "FLAGS_selected_gpus": "0",
            }
        else:
            mine |= {
                "PADDLE_DISTRI_BACKEND": "gloo",
                "OMP_NUM_THREADS": str(max(1, int(options.cpus))),
            }
        variables.append(mine)
    return [actor for _, actor in found], variables, ips


def run(
    options: argparse.Namespace, ranks: list[Any], received: list[int]
) -> int:
    """Start the ranks, follow global rank 0, see the run to its end, and return its exit code."""
    import ray

    ranks, variables, ips = told(options, ranks)
    command = [sys.executable, "-u", options.script, *options.arguments]
    folder = None if options.working_dir else os.getcwd()
    of_ranks = zip(ranks, variables, ips, strict=True)
    try:
        ray.get(
            [
                rank.start.remote(command, mine, ip, folder)
                for rank, mine, ip in of_ranks
            ]
        )
    except ray.exceptions.RayTaskError as error:
        way_out = (
            "run this in a folder that every node has, or give --working-dir"
        )
        say(
            f"the ranks cannot be started: {str(error.cause).splitlines()[0]}; {way_out}"
        )
        return 2
    offset, codes = 0, list[int | None]()
    while True:
        try:
            looks = ray.get(
                [
                    rank.look.remote(offset if rank is ranks[0] else NOTHING)
                    for rank in ranks
                ]
            )
        except ray.exceptions.RayError as error:
            say(f"a node or an actor was lost: {str(error).splitlines()[0]}")
            return 1
        sys.stdout.buffer.write(looks[0][0])
        sys.stdout.flush()
        offset, codes = (
            offset + len(looks[0][0]),
            [code for _, code, _ in looks],
        )
        if received or any(codes) or None not in codes:
            break
        time.sleep(POLL_SECONDS)
    ends = ray.get([rank.look.remote(-SHOWN_BYTES) for rank in ranks])
    ray.get([rank.stop.remote() for rank in ranks])
    if received:
        say(f"stopped by {signal.Signals(received[0]).name}")
        return 128 + received[0]
    if not any(codes):
        return 0
    # Others fail because one has: a little later, by clocks of hosts that agree.
    first = min(
        (rank for rank, code in enumerate(codes) if code),
        key=lambda rank: looks[rank][2],
    )
    # the cause comes last
    for rank in [
        *(rank for rank in range(len(ranks)) if rank != first),
        first,
    ]:
        print(
            f"--- rank {rank} on {ips[rank]} ---",
            ends[rank][0].decode(errors="replace"),
            sep="\n",
            file=sys.stderr,
        )
    code = codes[first] or 1
    say(
        f"rank {first} of {len(ranks)} failed with exit code {code}, on {ips[first]}"
    )
    return code if code > 0 else 128 - code


def say(text: str) -> None:
    """Print a line of our own to standard error, apart from what the ranks print."""
    print(f"on_ray.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
