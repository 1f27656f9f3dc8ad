"""What is said of ranks on several hosts: who is late, one of them or all of a host."""

import pytest

from paddle_shard.clock import LOADER, READING, TRANSPORT
from paddle_shard.delivery.advice import Summary, Taken, advice, summary_of

USUAL = Summary(
    num_steps=64,
    step=0.010,
    hidden=0.0,
    wait=0.0,
    others=0.0,
    cause=(LOADER, ""),
    cause_wait=0.0,
    cause_work=0.0,
    work=0.0,
    mean_work=0.0,
    cpu=0.0,
    slowest=(0.0, ""),
    samples=8.0,
    num_bytes=1e6,
    num_workers=2,
    most_workers=None,
    num_ahead=2,
    num_replicas=1,
    num_cores=8,
    cores=1,
    host="a",
)


def waiting(seconds, **more):
    """A rank that waits so long for what it reads itself."""
    found = {"cause_wait": seconds, "cause_work": seconds, "work": 2 * seconds, "mean_work": 2 * seconds, **more}
    return USUAL._replace(wait=seconds, cause=(READING, "file x.tar"), **found)


def job(**of_hosts):
    """The summaries of a job, by global rank, with the hosts that they are given by."""
    ranks = [one._replace(host=host) for host, ranks in of_hosts.items() for one in ranks]
    return dict(enumerate(ranks))


@pytest.mark.parametrize(
    ("told", "who"),
    [
        (job(a=[USUAL, waiting(0.02)]), "on global rank 1, reading file x.tar"),
        (job(a=[USUAL] * 2, b=[USUAL, waiting(0.02)]), "on global rank 3 (host b), reading file x.tar"),
        (job(a=[USUAL] * 2, b=[waiting(0.02), waiting(0.022)]), "on all 2 ranks of host b, reading file x.tar"),
        (job(a=[waiting(0.020)] * 2, b=[waiting(0.021)] * 2), "on global rank 2 (host b), reading"),  # all are late
        (job(a=[waiting(0.02)], b=[USUAL]), "on global rank 0 (host a), reading"),
        (job(a=[waiting(0.02)]), "would take 10 ms: reading file x.tar"),
    ],
)
def test_who_waits_for_its_data_is_named(told, who):
    assert who in advice(told), advice(told)


def slow(seconds):
    return USUAL._replace(step=seconds)


FOR_OTHERS = USUAL._replace(others=0.01)


@pytest.mark.parametrize(
    ("told", "who"),
    [
        (job(a=[FOR_OTHERS, slow(0.02)]), "takes 20 ms on global rank 1, and 10 ms on others"),
        (job(a=[FOR_OTHERS] * 2, b=[slow(0.02), slow(0.021)]), "takes 21 ms on all 2 ranks of host b, and 10 ms on"),
        (job(a=[FOR_OTHERS] * 2, b=[slow(0.02), FOR_OTHERS]), "takes 20 ms on global rank 2 (host b), and 10 ms on"),
        (job(a=[FOR_OTHERS] * 2, b=[FOR_OTHERS] * 2), "no rank's own data is late"),
        (job(a=[FOR_OTHERS, slow(0.02)._replace(hidden=0.015)]), "the device takes 20 ms on global rank 1, and 10 ms"),
    ],
)
def test_whose_code_is_late_is_named(told, who):
    assert who in advice(told), advice(told)


def test_nothing_is_claimed_of_ranks_that_are_alike():
    assert advice(job(a=[USUAL] * 2, b=[USUAL] * 2)).startswith("Training waits for data 0.0% of each step")


@pytest.mark.parametrize(
    ("workers", "remedy"),
    [
        (0, "3 workers (num_workers=) with prefetch_factor=9 evens that out."),
        (2, "3 workers instead of 2 (num_workers=) with prefetch_factor=9 evens that out."),
        (4, "took 500 ms. prefetch_factor=7 evens that out."),
    ],
)
def test_of_rare_slow_samples_the_mean_tells_how_many_workers_and_the_slowest_how_far_ahead(workers, remedy):
    """One sample in ten steps of 20 ms takes half a second, so that a step takes 50 ms of reading on average."""
    one = waiting(0.03, step=0.02, work=0.001, mean_work=0.05, slowest=(0.5, "sample 7"), num_workers=workers)
    assert remedy in advice({0: one}), advice({0: one})


def test_the_larger_of_two_causes_is_told():
    """One rank's code takes 30 ms more than that of the others, and its own data 4 ms."""
    late = USUAL._replace(step=0.04, wait=0.004, cause=(LOADER, ""), cause_work=0.004)
    said = advice(job(a=[USUAL._replace(others=0.03), late]))
    assert (
        "the code between two batches takes 40 ms on global rank 1, and 10 ms on others. Look at what is done" in said
    )
    assert "On global rank 1 a step waits 4 ms for its data, too: the loader itself. Larger batches" in said
    late = late._replace(wait=0.001)
    assert "10 ms on others. Data is ready when it is asked for" in advice(job(a=[USUAL._replace(others=0.03), late]))
    assert "on global rank 1, reading" in advice(job(a=[USUAL._replace(others=0.03), waiting(0.05, step=0.04)]))
    # A collective of rank 0 takes the time in which rank 1 reads, or its code does: the figures do not tell.
    said = advice(job(a=[slow(0.09), waiting(0.07)]))
    assert "on global rank 1, reading" in said
    assert "would take 10 ms (or 90 ms, if that is what the code of global rank 0 takes by itself, and no wait" in said


def busy(cores):
    """A rank that reads by 2 workers, for which they compute on so many cores all the time."""
    cpu = cores * USUAL.step
    return waiting(0.02, cpu=cpu, work=0.03, mean_work=0.03, num_cores=2)


def test_ranks_that_share_cores_compete_for_them():
    assert "4 workers instead of 2 (num_workers=) would hide it." in advice(job(a=[busy(1.0)]))
    for_both = advice(job(a=[busy(1.5), busy(1.5)]))
    assert "All of it would keep 3.0 of this host's 2 cores busy" in for_both
    apart = [busy(1.5)._replace(cores=number) for number in (1, 2)]
    assert "would hide it." in advice(job(a=apart))
    assert "would hide it." in advice(job(a=[busy(1.5)], b=[busy(1.5)]))


def test_one_reader_for_replicas_is_advised_where_cores_are_short_and_not_where_reads_wait():
    replicas = {"num_replicas": 2}
    assert "leader" not in advice(job(a=[busy(0.1)._replace(**replicas)] * 2))
    said = advice(job(a=[busy(1.5)._replace(**replicas)] * 2))
    assert "or replicas='leader', which reads once for 2 ranks" in said


def test_what_some_of_the_samples_take_is_told_by_the_step():
    one = waiting(0.02, cause_work=0.016)
    assert "reading source 'chat', 16 ms a step" in advice({0: one._replace(cause=(READING, "source 'chat'"))})
    assert "reading `Images`, 2 ms a sample" in advice({0: one._replace(cause=(READING, "`Images`"))})


def test_a_stream_is_not_told_to_have_more_workers_than_parts():
    said = advice({0: waiting(0.05, work=0.07, mean_work=0.07, num_workers=4, most_workers=4)})
    assert "The stream's 4 parts on this rank are work for as many workers" in said
    assert "in_parts()" in said
    assert "8 workers instead of 4" in advice(
        {0: waiting(0.05, work=0.07, mean_work=0.07, num_workers=4, most_workers=8)}
    )


def test_what_is_set_already_is_not_advised():
    one = waiting(0.01, step=0.02, work=0.01, mean_work=0.01, num_ahead=6)
    assert "prefetch_factor=12 evens that out" in advice({0: one})
    assert "the slowest" not in advice({0: one._replace(slowest=(0.002, "sample 3"))}), "which is like the others"


def test_what_is_little_more_than_copying_is_not_told_to_be_copied_once_more():
    copies = waiting(0.002, work=0.004, mean_work=0.004, cpu=0.004, num_bytes=16e6, num_workers=0)
    assert "That is copying 16 MB, and workers would copy it once more: smaller dtypes" in advice({0: copies})
    assert "would hide it" in advice({0: copies._replace(num_bytes=1e6)})
    assert "would hide it" in advice({0: copies._replace(cpu=0.001)}), "it waits for a disk"
    handed = copies._replace(cause=(TRANSPORT, ""), num_workers=2, work=0.001)
    assert advice({0: handed}).endswith(
        "cheaper. Making it takes 1 ms; without workers (num_workers=0) it is not handed over."
    )
    assert "without workers" not in advice({0: handed._replace(work=0.02)})


def test_a_slow_sample_that_always_comes_in_the_turn_of_one_worker_is_not_told_to_be_read_further_ahead_for_ever():
    one = waiting(0.01, step=0.02, work=0.01, mean_work=0.02, slowest=(0.16, "sample 64"))
    said = [advice({0: one._replace(num_ahead=ahead)}) for ahead in (2, 4, 8, 16)]
    assert ["evens that out" in text for text in said] == [True, True, False, False]
    assert "3 workers (num_workers=) or shuffle=True spread them" in said[-1]


def test_a_thread_that_computes_beside_the_loop_is_told_where_it_may_hold_it_up():
    beside = USUAL._replace(num_workers=0, cpu=0.006)
    assert "Data is ready when it is asked for. A thread beside your loop computes it, 6 ms a step" in advice(
        {0: beside}
    )
    for other in (beside._replace(cpu=0.0005), beside._replace(num_workers=1)):
        assert advice({0: other}).endswith("Data is ready when it is asked for.")


@pytest.mark.parametrize(
    ("cpu", "workers", "cores", "told"),
    [
        (0.0, 0, 2, "any number of workers makes it faster"),
        (0.9, 0, 4, "up to 4 workers make it faster"),
        (0.9, 4, 4, "of this host's 4 cores busy"),
        (0.9, 0, 1, "of this host's 1 cores busy"),
    ],
)
def test_a_loop_that_does_little_else_is_told_no_more_workers_than_its_cores_are_for(cpu, workers, cores, told):
    one = waiting(1.0, step=0.001, work=1.0, mean_work=1.0, cpu=cpu, num_workers=workers, num_cores=cores)
    assert told in advice({0: one})


def test_a_loop_without_a_step_is_not_told_a_number_of_workers():
    said = advice({0: waiting(0.01, step=1e-6, slowest=(0.5, "sample 7"), mean_work=0.05)})
    assert "any number of workers" in said


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([0.01] * 63 + [5.0], 0.01),  # a checkpoint
        ([0.002, 0.002, 0.002, 0.058] * 16, 0.0153),  # gradients of four batches
        ([0.01, 0.011] * 32, 0.0105),
    ],
)
def test_a_step_is_what_most_take_or_where_they_take_turns_the_mean(steps, told):
    booked = {}, {(LOADER, ""): 0.001}
    recent = [Taken(step, (0.0, 0.001), 0.001, 0.0, booked, {}, 0.0, (0.0, ""), [], 8, 100) for step in steps]
    assert summary_of(recent, 0, 1, None, 2).step == pytest.approx(told, rel=0.01)


def test_a_cause_that_is_not_most_of_the_wait_is_not_said_to_be_it():
    assert "10 ms: first of all reading file x.tar" in advice({0: waiting(0.02, cause_wait=0.008)})
