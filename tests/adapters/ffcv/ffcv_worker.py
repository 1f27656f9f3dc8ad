"""Real ranks that read FFCV's files."""

import sys
from functools import partial
from pathlib import Path

from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
from ffcv.pipeline.allocation_query import AllocationQuery
from ffcv.pipeline.operation import Operation

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "demos/adapters"))
from ffcv_recipe import ffcv_loader
from observe import loader_of, main, observe, refusal, steps_of

DATA = sys.argv[1]


class Fails(Operation):
    """An operation that raises in FFCV's thread."""

    def generate_code(self):
        def fail(batch, destination):
            raise ValueError("on purpose")

        return fail

    def declare_state_and_memory(self, previous_state):
        return previous_state.__class__(
            **{**vars(previous_state), "jit_mode": False}
        ), AllocationQuery(previous_state.shape, previous_state.dtype)


def arrays():
    return {"image": [NDArrayDecoder()], "id": [IntDecoder()]}


def loader(**options):
    return ffcv_loader(DATA, batch_size=6, **options)


def observed():
    found = {
        "plain": observe(loader),
        "shuffled": observe(lambda: loader(shuffle=True, pipelines=arrays())),
        "quasi": observe(lambda: loader(shuffle="quasi", os_cache=False)),
        "chosen": observe(
            lambda: loader(shuffle=True, indices=range(0, 23, 2)), resume=False
        ),
    }
    named = loader_of(loader(as_dict=True))
    found["fields"] = sorted(next(iter(named)))
    kept = loader_of(loader(shuffle=True, batches_ahead=1))
    # FFCV has written to its memory again
    found["held"] = [[image, ids] for image, ids in kept]
    found["held"] = [
        bool(
            (
                image._local_value().numpy()
                == (ids._local_value().numpy().reshape(-1, 1, 1) / 7).astype(
                    "float32"
                )
            ).all()
        )
        for image, ids in found["held"]
    ]
    broken = partial(
        loader,
        pipelines={"image": [NDArrayDecoder(), Fails()], "id": [IntDecoder()]},
    )
    found["refused"] = {
        **{
            name: refusal(lambda name=name: loader(**{name: 1}))
            for name in ("distributed", "order", "seed", "drop_last")
        },
        "batch size": refusal(
            lambda: steps_of(loader_of(ffcv_loader(DATA, batch_size=5)), 1)
        ),
        "shuffle": refusal(lambda: loader(shuffle="blocks")),
        "dead thread": refusal(lambda: steps_of(loader_of(broken()), 1)),
    }
    return found


if __name__ == "__main__":
    main(observed)
