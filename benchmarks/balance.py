"""How equal are the costs of the data ranks' rows, and what does dealing them take?

    python benchmarks/balance.py

The same costs are dealt in the same run: as they come; sorted and dealt back and forth, as a script would; and by
`balance=`. A batch of which one row costs more than the mean of a data rank cannot be equal: "the least there is" is
the mean of a lower bound, the larger of 1 and that row with the cheapest others.
"""

import sys

import numpy as np
from common import (
    busy,
    in_turns,
    machine,
    print_table,
    print_target,
    seconds,
    time_of,
)

from paddle_shard.plan.balance import assign_rows, loads

RANKS, ROWS, STEPS = 8, 16, 200


def lengths(median, sigma, most):
    drawn = np.random.default_rng(0).lognormal(
        np.log(median), sigma, (STEPS, RANKS * ROWS)
    )
    return np.minimum(drawn, most)


COSTS = {
    "lengths: median 400, sigma 1, cut at 4096": lengths(400, 1, 4096),
    "log-normal, sigma 1, not cut": lengths(1, 1, np.inf),
    "squares of the cut lengths": lengths(400, 1, 4096) ** 2,
}


def back_and_forth(costs, ranks):
    order = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    order[1::2] = order[1::2, ::-1]
    return order.T.reshape(-1)


def as_they_come(costs, ranks):
    return np.arange(len(costs))


WAYS = {
    "as they come": as_they_come,
    "sorted, dealt back and forth": back_and_forth,
    "balance= (ours)": assign_rows,
}


def imbalance(step, way):
    most, mean = loads(step[way(step, RANKS)], RANKS)
    return most / mean


def least(step):
    bound = (step.max() + np.sort(step)[: ROWS - 1].sum()) / step.sum() * RANKS
    return max(1.0, float(bound))


def main():
    print(f"{machine()}; {busy()}\n")
    rows = []
    found = {}
    for name, steps in COSTS.items():
        times = in_turns(
            {
                way: lambda way=way, steps=steps: seconds(
                    lambda: [WAYS[way](step, RANKS) for step in steps]
                )
                for way in WAYS
            },
            5,
        )
        for way in WAYS:
            each = [imbalance(step, WAYS[way]) for step in steps]
            found[name, way] = np.mean(each), times[way] / STEPS
            rows.append(
                [
                    name,
                    way,
                    f"{np.mean(each):.3f}",
                    f"{max(each):.3f}",
                    time_of(times[way] / STEPS),
                ]
            )
        bound = [least(step) for step in steps]
        rows.append(
            [
                name,
                "the least there is",
                f"{np.mean(bound):.3f}",
                f"{max(bound):.3f}",
                "",
            ]
        )
    title = f"Largest cost of {RANKS} data ranks over their mean, {ROWS} rows each, {STEPS} steps"
    print_table(title, ["costs", "dealt", "mean", "largest", "a step"], rows)
    first = next(iter(COSTS))
    mean, cost = found[first, "balance= (ours)"]
    print_target(
        "largest over mean at most 1.02 on lengths",
        f"{mean:.3f}",
        bool(mean <= 1.02),
    )
    print_target("under 100 us a step", time_of(cost), bool(cost < 100e-6))


if __name__ == "__main__":
    sys.exit(main())
