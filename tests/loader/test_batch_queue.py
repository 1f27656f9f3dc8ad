"""Batch queue: what one thread puts in another takes in order and soon, however slowly it comes."""

import random
import threading
import time

import pytest

from paddle_shard.loader.batch_queue import BatchQueue
from tests.deadlines import HANG


@pytest.mark.parametrize("seed", range(20))
def test_batch_queue_gives_all_items_in_order(seed):
    chance, queue = random.Random(seed), BatchQueue()
    pauses = [chance.choice([0, 0, 0, 0, 1e-4, 5e-3]) for _ in range(200)]

    def put_all():
        for number, pause in enumerate(pauses):
            time.sleep(pause)
            queue.put(number)

    thread = threading.Thread(target=put_all)
    thread.start()
    got = []
    for _ in pauses:
        got.append(queue.get())
        time.sleep(chance.choice([0, 0, 1e-4]))
    thread.join()
    assert got == list(range(200))


def test_batch_queue_gives_what_there_is_while_the_next_item_hangs():
    queue, taken = BatchQueue(), threading.Event()

    def put_two():
        queue.put(0)
        assert taken.wait(HANG), "the first item did not come before the second"
        queue.put(1)

    for _ in range(3):
        taken.clear()
        thread = threading.Thread(target=put_two)
        thread.start()
        assert queue.get() == 0
        taken.set()
        assert queue.get() == 1
        thread.join()


def test_batch_queue_gathers_only_while_it_is_awaited():
    queue = BatchQueue()
    queue.put(0)
    assert not queue.wants_more
