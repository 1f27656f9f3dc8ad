"""Real ranks that read DALI pipelines on the CPU."""

import sys
from itertools import product
from pathlib import Path

import numpy as np
from nvidia.dali import fn, pipeline_def

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "demos/adapters"))
from dali_recipe import dali_pipeline
from observe import loader_of, main, observe, refusal, steps_of

DATA = Path(sys.argv[1])


@pipeline_def
def samples(
    shard_id, num_shards, folder="equal", pad=False, stick=False, shuffle=False
):
    """(id as float32, noise, id)"""
    ids = fn.readers.numpy(
        file_root=str(DATA / folder),
        file_filter="*.npy",
        shard_id=shard_id,
        num_shards=num_shards,
        pad_last_batch=pad,
        stick_to_shard=stick,
        random_shuffle=shuffle,
        initial_fill=8,
    )
    return ids / 7.0, fn.random.uniform(range=[0.0, 1.0], shape=[2]), ids


def pipeline(**options):
    return dali_pipeline(
        samples,
        batch_size=6,
        **{"num_threads": 1, "device_id": None, **options},
    )


def first_step(build, batch_size=6, **options):
    foreign = dali_pipeline(
        build,
        batch_size=batch_size,
        **{"num_threads": 1, "device_id": None, **options},
    )
    return refusal(lambda: steps_of(loader_of(foreign), 1))


def unsplit(shard_id, num_shards, **options):
    return samples(shard_id=0, num_shards=1, **options)


def of_the_world(shard_id, num_shards, **options):
    return samples(shard_id=shard_id, num_shards=4, **options)


def without_checkpoint(enable_checkpointing, checkpoint, **options):
    return samples(**options)


def other_batch(batch_size, **options):
    return samples(batch_size=4, **options)


@pipeline_def
def without_reader(shard_id, num_shards):
    return fn.external_source(source=lambda info: np.zeros(2), batch=False)


def observed():
    found = {"plain": observe(pipeline)}
    for pad, stick in product([False, True], repeat=2):
        options = {"pad": pad, "stick": stick, "shuffle": True}
        found[f"shuffled {pad} {stick}"] = observe(
            lambda options=options: pipeline(**options), resume=pad == stick
        )
    found["static executor"] = observe(lambda: pipeline(exec_dynamic=False))
    named = loader_of(
        dali_pipeline(
            samples,
            batch_size=6,
            fields=["x", "noise", "id"],
            num_threads=1,
            device_id=None,
        )
    )
    found["fields"] = sorted(next(iter(named)))
    found["refused"] = {
        "unsplit": first_step(unsplit),
        "world": first_step(of_the_world),
        "no reader": first_step(without_reader),
        "no checkpoint": first_step(without_checkpoint),
        "other batch": first_step(other_batch),
        "no pipeline": first_step(lambda **options: None),
        "ragged": first_step(samples, folder="ragged"),
        "fields": first_step(samples, fields=["x"]),
        "batch size": first_step(samples, batch_size=5),
        "seed": refusal(lambda: pipeline(seed=1)),
    }
    return found


if __name__ == "__main__":
    main(observed)
