"""What is claimed of every library, checked on what `observe.py` saw on each rank."""


def by_data_rank(reports, name):
    """One rank's view for each of the two data ranks; replicas are compared."""
    replicas = len(reports) // 2
    found = []
    for data_rank in range(2):
        same = [
            reports[rank][name]
            for rank in range(data_rank * replicas, (data_rank + 1) * replicas)
        ]
        assert all(one == same[0] for one in same), f"{name}: replicas agree"
        found.append(same[0])
    return found


def ids_of(passes):
    """The real samples of an epoch, of all data ranks."""
    return [i for steps in passes for step in steps for i in step["ids"]]


def check(reports, name, samples, *, shuffled, resumes=True):
    """Check every claim on the reports of two data ranks."""
    ranks = by_data_rank(reports, name)
    for epoch in range(2):
        passes = [rank["epochs"][epoch] for rank in ranks]
        assert sorted(ids_of(passes)) == sorted(samples), (
            f"{name}: every sample exactly once"
        )
        assert len({len(steps) for steps in passes}) == 1, (
            f"{name}: equal steps"
        )
        assert len({step["rows"] for steps in passes for step in steps}) == 1, (
            f"{name}: equal rows"
        )
    first, second = (
        [rank["epochs"][epoch] for rank in ranks] for epoch in range(2)
    )
    assert (ids_of(first) != ids_of(second)) == shuffled, (
        f"{name}: epochs differ where shuffled"
    )
    assert all(rank["again"] == rank["epochs"] for rank in ranks), (
        f"{name}: the same seed repeats"
    )
    others = [rank["other seed"] for rank in ranks]
    assert sorted(ids_of(others)) == sorted(samples)
    assert (ids_of(others) != ids_of(first)) == shuffled, (
        f"{name}: another seed is another order"
    )
    dropped = ids_of(rank["dropped"] for rank in ranks)
    assert len(set(dropped)) == len(dropped), f"{name}: nothing twice"
    assert set(dropped) <= set(samples)
    assert all(
        step["rows"] == len(step["ids"])
        for rank in ranks
        for step in rank["dropped"]
    )
    if resumes:
        for rank in ranks:
            for step, resumed in enumerate(rank["resumed"], start=1):
                assert resumed["steps"] == rank["epochs"][0], (
                    f"{name}: resumed at {step} = straight"
                )
                assert resumed["next epoch"] == rank["epochs"][1], (
                    f"{name}: the epoch behind it"
                )
    for report in reports:
        assert report[name]["other data ranks"].startswith("StateError"), (
            report[name]["other data ranks"]
        )
        assert report[name]["environment"] == [], (
            "no variable of torch.distributed is left behind"
        )
        assert not report[name]["torch runs"]
