"""Check delivery on a real GPU, without a GPU build of Paddle: README.md beside this file says how.

    python3 tests/device/real/check_real_device.py --built FOLDER [--seconds 420] [--only NAME ...] [--small]

Each check is a process of its own with a deadline, in the order of their worth; measurements are written to
$OUT/real.json (.real/real.json) after each. Exit status 1 if one failed.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
PLAIN, HEAVY, LEGACY = (
    {"STANDIN_PIN": "0"},
    {"STANDIN_HEAVY": "1"},
    {"STANDIN_LEGACY": "1"},
)
BROKEN = {"CHECK_BREAK": "1"}
PLAN = [  # name, check, settings, seconds at most
    ("bytes", "bytes", {}, 60),
    ("bytes, pageable", "bytes", PLAIN, 60),
    ("bytes, legacy stream", "bytes", LEGACY, 60),
    ("next", "next", {}, 60),
    ("next, pageable", "next", PLAIN, 60),
    ("next, legacy stream", "next", LEGACY, 60),
    ("steps", "steps", {}, 180),
    ("numbers", "numbers", {}, 90),
    ("numbers, broken: must fail", "numbers", BROKEN, 60),
    ("drops", "drops", {}, 120),
    ("statistics", "statistics", {}, 60),
    ("copies", "copies", {}, 60),
    ("tests", "tests", {}, 150),
    ("gpu tests", "gpu tests", {}, 90),
    ("ranks", "ranks", {}, 120),
    ("numbers, heavy", "numbers", HEAVY, 90),
    ("numbers, pageable", "numbers", PLAIN, 90),
    ("steps, heavy", "steps", HEAVY, 180),
    ("tests, legacy stream", "tests", LEGACY, 150),
]
TESTS = {
    "tests": [
        "-n4",
        "test_delivery.py",
        "test_copies.py",
        "test_generators.py",
    ],
    "gpu tests": ["-s", "test_gpu.py"],
    "drops": ["-n3", "test_drops.py"],
    "ranks": ["test_ranks.py", "test_checkpoints.py"],
}


def command_of(check):
    if check not in TESTS:
        return [sys.executable, "-m", "tests.device.real.checks", check]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    pytest += ["-p", "tests.device.on_standin", "-W", "default"]
    return pytest + [
        f"tests/device/{arg}" if arg.endswith(".py") else arg
        for arg in TESTS[check]
    ]


def rows_in(lines):
    """Return the measurements that a check printed, also if it did not end."""
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:  # of a library, or cut
            continue
    return [row for row in rows if isinstance(row, dict)]


def run_check(check, settings, seconds, built, is_small):
    """Run a check, and return its status ("late" after the deadline), measurements and last lines."""
    env = os.environ | {
        "CUSTOM_DEVICE_ROOT": str(built),
        "FLAGS_use_stride_kernel": "0",
        "GLOG_minloglevel": "2",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": f"{REPO}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "CHECK_SMALL": "1" if is_small else "",
        "DROPS": "20" if is_small else "100",
    }
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command_of(check),
            env=env | settings,
            cwd=REPO,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "late"
        output.seek(0)
        lines = output.read().splitlines()
    if settings == BROKEN:
        is_seen = status == 1 and any("other numbers" in line for line in lines)
        status = 0 if is_seen else "not seen"
    return {
        "status": status,
        "seconds": round(time.perf_counter() - began, 1),
        "rows": rows_in(lines),
        "tail": lines[-60:],
        "printed": [
            line
            for line in lines
            if " took " in line or "GB/s" in line or "ms a step" in line
        ],
    }


def describe_machine():
    query = "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current"
    try:
        gpu = subprocess.check_output(
            ["nvidia-smi", query, "--format=csv,noheader"],
            text=True,
            timeout=30,
        ).strip()
    except (OSError, subprocess.SubprocessError) as error:
        gpu = str(error)
    return {
        "gpu": gpu,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "libc": platform.libc_ver()[1],
        "kernel": platform.release(),
    }


def show(name, result):
    print(f"{result['status']}  {result['seconds']:6.1f} s  {name}", flush=True)
    for row in result["rows"]:
        print(
            "      ", ", ".join(f"{key} {value}" for key, value in row.items())
        )
    tail = result["tail"] if result["status"] else result["tail"][-1:]
    for line in result["printed"] + (
        tail if tail and tail[0][:1] != "{" else []
    ):
        print("     |", line[:200])
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--built", required=True, type=Path, help="has libstandin.so"
    )
    parser.add_argument(
        "--seconds", type=float, default=420, help="for all checks"
    )
    parser.add_argument("--only", nargs="*", help="names of checks")
    parser.add_argument("--small", action="store_true", help="without a GPU")
    chosen = parser.parse_args()
    deadline = time.perf_counter() + chosen.seconds
    about, results = describe_machine(), {}
    out = Path(os.environ.get("OUT", REPO / ".real"))
    out.mkdir(exist_ok=True)
    print(json.dumps(about), flush=True)
    for name, check, settings, seconds in PLAN:
        if chosen.only and name not in chosen.only:
            continue
        left = deadline - time.perf_counter()
        if left < 10:
            results[name] = {"status": "not run", "seconds": 0.0}
            print(f"not run: {name}", flush=True)
            continue
        limit = min(3 * seconds if chosen.small else seconds, left)
        results[name] = run_check(
            check, settings, limit, chosen.built.resolve(), chosen.small
        )
        report = json.dumps({"machine": about, "checks": results}, indent=1)
        (out / "real.json").write_text(report)
        show(name, results[name])
        if name == "bytes" and results[name]["status"] != 0:
            print("stopped: no other check means anything")
            break
    bad = [name for name, result in results.items() if result["status"] != 0]
    print(f"{len(results) - len(bad)} checks passed; not passed: {bad}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
