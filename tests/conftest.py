import gc
import os
import signal
from importlib.util import find_spec

import pytest

from paddle_shard.testing import RanksFailed
from tests.jobs import run_ranks
from tests.trials import LONG as RUNS_LONG
from tests.trials import trials

# as a shell starts what runs in its background
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until all tests are collected, which makes nothing to collect
if find_spec("hypothesis"):  # which other libraries' environments do without
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "on a busy machine",
        max_examples=trials(60),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("on a busy machine")
# Scripts that ranks run are no test modules: collecting one for doctests would run it.
collect_ignore_glob = ["*/*_worker.py"]
# Other libraries need environments of their own: `make test-adapters`. `make demos` runs the demos.
STARTS_PROCESSES = {"faults", "launch", "multiprocess"}
STARTS_PROCESSES |= {
    "test_worker_processes",
    "test_worker_batches",
    "test_channel",
    "test_s3",
    "test_types",
}
LONG = {"faults", "launch", "multiprocess", "testing"}
OTHERS = {
    "adapters": "PADDLE_SHARD_ADAPTER",
    "demos": "PADDLE_SHARD_DEMOS",
    "trainers": "PADDLE_SHARD_TRAINER",
}
collect_ignore = [
    folder for folder, asked in OTHERS.items() if asked not in os.environ
]


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory):
    """Counts of files are kept here, by the ranks that tests start, too, and not where the user has them."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """`run_ranks`, by which a module's tests that ask for the same job share its reports, or its failure."""
    found = {}

    def run(script, num_ranks, args=(), **options):
        job = script, num_ranks, *args
        if job not in found:
            try:
                found[job] = run_ranks(
                    script,
                    num_ranks,
                    tmp_path_factory.mktemp("job"),
                    args=args,
                    **options,
                )
            except RanksFailed as error:
                found[job] = error
        if isinstance(found[job], RanksFailed):
            raise found[job]
        return found[job]

    return run


@pytest.fixture(scope="module")
def run_case(run_once):
    """What each rank reports of one of several cases, which one job runs; if that job fails, of the case run alone.

    The script is given the names of cases, does one after the other, and reports {name: what it found}.
    """

    def run(script, num_ranks, case, cases, **options):
        try:
            reports = run_once(script, num_ranks, cases, **options)
        except (
            RanksFailed
        ):  # so that a case that breaks or hangs takes no other with it
            reports = run_once(script, num_ranks, [case], **options)
        return [report[case] for report in reports]

    return run


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Examples are in the package's docstrings; looking for some in every test takes seconds."""
    collectors = yield
    return [
        collector
        for collector in collectors
        if type(collector).__name__ != "DoctestModule"
    ]


def pytest_collection_finish():
    """What was imported stays: each look for garbage, here and in forked processes, passes over it, 0.2 s of CPU."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    """Mark what starts processes, which `make quick` leaves out: whole rooms, and tests of workers."""
    for item in items:
        workers = getattr(
            item, "callspec", None
        ) is not None and item.callspec.params.get("workers")
        if (
            workers
            or item.path.parent.name in STARTS_PROCESSES
            or item.path.stem in STARTS_PROCESSES
        ):
            item.add_marker("processes")
        if "long" in item.keywords and not RUNS_LONG:
            item.add_marker(
                pytest.mark.skip(
                    reason="takes long, and a faster test covers it: make test-long"
                )
            )
    # Files that wait for many processes begin first: at the end the others would wait for them.
    items.sort(key=lambda item: item.path.parent.name not in LONG)
