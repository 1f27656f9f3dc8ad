"""Running launch scripts under a deadline: every process is killed by its id, every log is shown on failure."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deadlines import HANG

_TEST_ID = "TEST_LAUNCH_ID"


class Commands:
    """Processes of one test, each with its output in `directory/<name>.out` and `.err`."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._token = uuid.uuid4().hex
        self._started: dict[str, subprocess.Popen] = {}

    def start(self, name, command, **variables) -> subprocess.Popen:
        ours = ("PADDLE_", "POD_", "TRAINER_", "FLAGS_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        env |= {"OMP_NUM_THREADS": "1", **variables, _TEST_ID: self._token}
        with (
            open(self.directory / f"{name}.out", "wb") as out,
            open(self.directory / f"{name}.err", "wb") as err,
        ):
            self._started[name] = subprocess.Popen(
                list(map(str, command)),
                env=env,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        return self._started[name]

    def wait(self, timeout=HANG) -> dict[str, int]:
        """Return the exit code of every process that was started, or fail at the deadline."""
        deadline = time.monotonic() + timeout
        for process in self._started.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                running = [
                    name
                    for name, p in self._started.items()
                    if p.poll() is None
                ]
                pytest.fail(
                    f"the deadline of {timeout} s passed; still running: {running}"
                )
        return {
            name: process.returncode for name, process in self._started.items()
        }

    def out(self, name) -> str:
        return (self.directory / f"{name}.out").read_text()

    def err(self, name) -> str:
        return (self.directory / f"{name}.err").read_text()

    def until(self, condition, timeout=HANG) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not true within {timeout} s"
            time.sleep(0.05)

    def alive(self) -> list[int]:
        """Return the ids of all live processes that descend from this test's, detached ones too."""
        token = f"{_TEST_ID}={self._token}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and token in (
                    entry / "environ"
                ).read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile
                continue
        return found

    def kill(self) -> None:
        deadline = time.monotonic() + HANG
        while (left := self.alive()) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            for process in self._started.values():
                process.poll()
            time.sleep(0.05)
        assert not left

    def logs(self) -> str:
        paths = [*self.directory.rglob("*.out"), *self.directory.rglob("*.err")]
        paths += [
            *self.directory.rglob("workerlog.*"),
            *self.directory.rglob("launcher.log"),
        ]
        return "\n".join(
            f"--- {p} ---\n{p.read_text(errors='replace')[-6000:]}"
            for p in sorted(paths)
        )


_running: list[Commands] = []


@contextmanager
def _commands_in(directory: Path) -> Iterator[Commands]:
    commands = Commands(directory)
    _running.append(commands)
    try:
        yield commands
    finally:
        _running.remove(commands)
        commands.kill()


@pytest.fixture
def commands(tmp_path):
    with _commands_in(tmp_path) as commands:
        yield commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    ip: str
    enter: tuple[str, ...] = ()
    """Put before a command, makes it run on this host."""


@pytest.fixture
def two_hosts():
    names = [f"launch-{uuid.uuid4().hex[:6]}-{k}" for k in range(2)]
    hosts = [
        Host(ip=f"10.231.77.{k + 1}", enter=("ip", "netns", "exec", name))
        for k, name in enumerate(names)
    ]
    try:
        yield hosts if _joined(names, hosts) else [Host(ip="127.0.0.1")] * 2
    finally:
        for name in names:
            if Path("/run/netns", name).exists():
                _ip("netns", "delete", name)  # and the cable


def _joined(names, hosts) -> bool:
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            "eth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for name, host in zip(names, hosts, strict=True):
            _ip("-n", name, "address", "add", f"{host.ip}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _ip(*arguments):
    subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, timeout=10
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.extend(
            ("every log", commands.logs()) for commands in _running
        )
    return report
