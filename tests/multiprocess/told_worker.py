"""Ranks of which one makes a call that it alone cannot make: `cases CALLS SEED`; or leaves a loop by it: `ends VICTIM`,
`leaves VICTIM`, `not_made VICTIM`; or ends before it makes a loader: `import VICTIM`, `stream VICTIM`, `exit VICTIM`,
or `stop VICTIM`, where rank 0 is stopped. Each rank reports [the class of what it raises, its text, seconds].
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.loader import begin
from paddle_shard.testing import report
from tests.deadlines import HANG

FOLDER = Path(os.environ["PADDLE_SHARD_REPORT_DIR"])
VICTIM = dist.get_world_size() - 1
ME = dist.get_rank() == VICTIM


class Numbers(paddle.io.Dataset):
    def __init__(self, length=48):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return np.array(index)


def made(data=None, **options):
    mesh = dist.ProcessMesh(
        list(range(dist.get_world_size())), dim_names=["dp"]
    )
    given = paddle.io.DataLoader(
        data or Numbers(), batch_size=2 * dist.get_world_size()
    )
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims="dp", timeout=HANG, **options
    )


def mixture():
    return made(
        paddle_shard.Mixture(
            {"web": Numbers(), "code": Numbers()}, {"web": 1, "code": 1}
        )
    )


def fail(*_, **__):
    raise OSError("no more processes")


def broken(loader, where):
    """Have `iter(loader)` fail before the ranks agree on the pass, or when they have begun to."""
    if where == "early":
        loader._setup.reading.start = fail
    else:
        begin.StepPass = fail
    return iter(loader)


def gathered(loader, wrong):
    batches = iter(loader)
    next(batches)
    valid = batches.valid
    if wrong == "valid":
        valid = valid._local_value()
    rows = 2 if wrong != "rows" else 3
    if wrong == "nothing for valid":
        return paddle_shard.gather_valid(valid)
    values = (
        "text"
        if wrong == "type"
        else paddle.zeros([rows, 5 if wrong == "shape" else 1])
    )
    return paddle_shard.gather_valid(values, valid)


def gathered_dtypes():
    """Return what is gathered of values of each dtype, and the shape of what is gathered of values of no size."""
    batches = iter(made(Numbers(2 * dist.get_world_size() + 1)))
    *_, last = batches
    results = {}
    for dtype in ("bool", "int16", "int64", "float16", "bfloat16", "float64"):
        values = paddle_shard.gather_valid(last.astype(dtype), batches.valid)
        assert str(values.dtype) == f"paddle.{dtype}"
        results[dtype] = values.astype("int64").tolist()
    boxes = paddle.zeros([last._local_value().shape[0], 0, 5])
    results["no boxes"] = list(
        paddle_shard.gather_valid(boxes, batches.valid).shape
    )
    return results


class Ending(paddle.io.BatchSampler):
    """On one rank, it cannot be set to where its copy is at the end of an epoch."""

    def state_dict(self):
        return {"epoch": 0}

    def load_state_dict(self, state):
        if ME:
            fail()


def ending():
    data, size = Numbers(), dist.get_world_size()
    given = paddle.io.DataLoader(
        data, batch_sampler=Ending(dataset=data, batch_size=2 * size)
    )
    return paddle_shard.shard_dataloader(
        given,
        dist.ProcessMesh(list(range(size)), dim_names=["dp"]),
        shard_dims="dp",
        timeout=HANG,
    )


# (how the loader is made, the call where it fails, the call of the others)
CALLS = {
    "not made": (
        lambda: None,
        lambda loader: made(tail="none"),
        lambda loader: made(),
    ),
    "a state of another run": (
        made,
        lambda loader: loader.load_state_dict(made(seed=5).state_dict()),
        lambda loader: loader.load_state_dict(made().state_dict()),
    ),
    "no state": (
        made,
        lambda loader: loader.load_state_dict({}),
        lambda loader: loader.load_state_dict(loader.state_dict()),
    ),
    "a misspelt option": (
        made,
        lambda loader: loader.load_state_dict(
            loader.state_dict(), overrides=[]
        ),
        lambda loader: loader.load_state_dict(loader.state_dict()),
    ),
    "an epoch": (
        made,
        lambda loader: loader.set_epoch(-1),
        lambda loader: loader.set_epoch(1),
    ),
    "the sampler's epoch": (
        made,
        lambda loader: loader.batch_sampler.set_epoch(-1),
        lambda loader: loader.batch_sampler.set_epoch(1),
    ),
    "a loop": (made, lambda loader: broken(loader, "early"), list),
    "a loop that was agreed on": (
        made,
        lambda loader: broken(loader, "late"),
        list,
    ),
    "the end of a loop": (ending, list, list),
    **{
        f"gather_valid: {wrong}": (
            made,
            lambda loader, wrong=wrong: gathered(loader, wrong),
            lambda loader: gathered(loader, "nothing"),
        )
        for wrong in ("rows", "type", "valid", "shape", "nothing for valid")
    },
}


def said(call, *args):
    began = time.monotonic()
    try:
        call(*args)
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return None


def told(name):
    """What a rank raises in the call, or in a loop after it."""
    make, wrong, right = CALLS[name]
    loader = make()
    found = said(wrong if ME else right, loader)
    begin.StepPass = ORIGINAL
    return said(lambda: list(loader or made())) if found is None else found


ORIGINAL = begin.StepPass


# name -> the call, and what makes it a wrong one
AT_RANDOM = {
    "loop": (lambda loader: list(loader), []),
    "look": (lambda loader: next(iter(loader)), []),
    "set_epoch": (
        lambda loader: loader.set_epoch(2),
        [lambda loader: loader.set_epoch("2")],
    ),
    "load": (
        lambda loader: loader.load_state_dict(loader.state_dict()),
        [
            lambda loader: loader.load_state_dict(None),
            lambda loader: loader.load_state_dict(
                {**loader.state_dict(), "samples": -4}
            ),
            lambda loader: loader.load_state_dict(
                loader.state_dict(), override=["nothing"]
            ),
        ],
    ),
    "certificate": (
        lambda loader: loader.certificate(),
        [lambda loader: loader.certificate(1)],
    ),
    "gather_valid": (
        lambda loader: gathered(loader, "nothing"),
        [
            lambda loader, wrong=wrong: gathered(loader, wrong)
            for wrong in ("rows", "valid", "nothing for valid")
        ],
    ),
    "make": (
        lambda loader: mixture(),
        [lambda loader: made(verify=-1), lambda loader: made(tails="pad")],
    ),
}


def at_random(rng):
    """[the rank of which one call is wrong, what this one raises] of a random sequence of calls, alike on all ranks."""
    names = [rng.choice([*AT_RANDOM]) for _ in range(rng.randint(1, 5))]
    victim, at = rng.randrange(dist.get_world_size()), rng.randrange(len(names))
    names[at] = rng.choice(
        [name for name, (_, wrong) in AT_RANDOM.items() if wrong]
    )
    wrong, loader = rng.choice(AT_RANDOM[names[at]][1]), mixture()
    print(names, at, victim, flush=True)
    calls = [AT_RANDOM[name][0] for name in names]
    if dist.get_rank() == victim:
        calls[at] = wrong
    for call in [*calls, list]:
        if (found := said(call, loader)) is not None:
            return victim, found
    return victim, None


def after_a_failure(how, victim):
    """Report what the others raise in a loop that one rank leaves by a call that fails, and ends."""
    own = dist.get_rank() == victim
    loader = made()
    batches = iter(loader)
    next(batches)
    if own:
        try:
            made(tail="none") if how == "not_made" else loader.set_epoch(-1)
        except ValueError:
            if how != "leaves":
                raise
            batches.close()
            (FOLDER / "left").touch()
            time.sleep(3.0)
            return None
    return said(lambda: [time.sleep(0.1) for _ in batches])


def before_a_loader(how, victim):
    """Report what the others raise in their first loop, of which one ends before it makes a loader."""
    if how == "stop" and dist.get_rank() == 0:
        # the victim needs this rank's store until it has joined
        while not (FOLDER / "joined").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGSTOP)
    if dist.get_rank() == victim:
        if how in ("import", "stop"):
            (FOLDER / "joined").touch()
            time.sleep(float(how == "stop"))
            import there_is_no_such_module  # noqa: F401
        if how == "stream":
            paddle_shard.Stream.webdataset([FOLDER / "train-003.tar"])
        sys.exit(3)
    return said(lambda: list(made()))


if __name__ == "__main__":
    if sys.argv[1] == "cases":
        found = {}
        for name in json.loads(sys.argv[2]):
            print("case:", name, flush=True)
            found[name] = told(name)
        rng = random.Random(int(sys.argv[3]))
        found["at random"] = [at_random(rng) for _ in range(30)]
        found["later"] = [
            batch._local_value().numpy().tolist() for batch in made(Numbers(24))
        ]
        found["dtypes"] = gathered_dtypes()
        report(found)
        time.sleep(1.0)  # rank 0 has the store
    else:
        how, victim = sys.argv[1], int(sys.argv[2])
        if how in ("import", "stream", "exit", "stop"):
            dist.init_parallel_env()
            found = before_a_loader(how, victim)
        else:
            found = after_a_failure(how, victim)
        report(found)
        # another may still be on its way to this rank
        deadline = time.monotonic() + HANG / 4
        while (
            len([*FOLDER.glob("rank-*.json")]) < dist.get_world_size() - 1
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        os._exit(0)
