"""A loader with a worker that never comes back from a sample: `hung_worker.py TIMEOUT`."""

import sys
import time

from tests.faults.feeds import loader_of, read_until


def hang(number):
    if number == 60:
        time.sleep(1000)


if __name__ == "__main__":
    _, _, failure, _ = read_until(
        iter(
            loader_of(
                "map", 200, workers=2, fault=hang, timeout=float(sys.argv[1])
            )
        )
    )
    print(type(failure).__name__, failure)
