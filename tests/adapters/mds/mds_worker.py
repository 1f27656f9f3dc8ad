"""Real ranks that read MDS."""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "demos/adapters"))
from mds_recipe import mds_stream
from observe import SEED, loader_of, main, observe, refusal, steps_of

from paddle_shard.plan.state import sealed

ZIPPED = {"shuffle_algo": "py1br", "shuffle_block_size": 8, "predownload": 4}
DATA = Path(sys.argv[1])


def as_tuple(sample):
    return sample["image"], np.int64(sample["id"])


def stream(folder="plain", **options):
    return mds_stream(
        local=DATA / folder, batch_size=6, transform=as_tuple, **options
    )


def observed():
    import torch

    found = {
        "plain": observe(stream),
        "shuffled": observe(lambda: stream(shuffle=True)),
        "zipped": observe(
            partial(stream, "zipped", shuffle=True, **ZIPPED), resume=False
        ),
        "few": observe(
            lambda: mds_stream(
                local=DATA / "few", batch_size=2, transform=as_tuple
            ),
            resume=False,
        ),
        "remote": observe(
            lambda: mds_stream(
                remote=str(DATA / "plain"),
                local=DATA / "cache",
                batch_size=6,
                transform=as_tuple,
                shuffle=True,
            )
        ),
    }
    batches = iter(loader_of(stream(shuffle=True)))
    next(batches)
    del batches  # given up in the middle
    state = loader_of(stream())
    begun = steps_of(state, 1)
    other = loader_of(stream("zipped"), seed=SEED)
    saved = state.state_dict()
    # As that of another library's data, whole and with its checksum.
    other.load_state_dict(
        sealed(
            {
                **saved,
                "sampler": {
                    **saved["sampler"],
                    "library": {"at": 1, "saved": {}},
                },
            }
        )
    )
    found["refused"] = {
        "batch size": refusal(
            lambda: steps_of(
                loader_of(mds_stream(local=DATA / "plain", batch_size=5)), 1
            )
        ),
        "streams": refusal(
            lambda: mds_stream(local=DATA, batch_size=6, streams=[])
        ),
        "begun": len(begun),
        "state": refusal(lambda: steps_of(other)),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    found["refused"]["torch.distributed"] = refusal(
        lambda: steps_of(loader_of(stream()), 1)
    )
    torch.distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    main(observed)
