"""Documents of different lengths, and the loaders that are tried with them."""

import numpy as np

LENGTHS = [3, 1, 7, 2, 2, 2, 2, 2, 5, 11, 4, 4, 1, 6, 8, 9, 3, 2, 1, 5, 12, 4]
VALUES = {"ids": 0, "labels": -100, "mask": 0, "weights": 0.5}
BY_POSITION = dict(enumerate(VALUES.values()))
DP, DP_SEP = ((2,), ("dp",)), ((2, 2), ("dp", "sep"))
MP_DP = ((2, 2), ("mp", "dp"))
CASES = {
    "map": {"mesh": DP, "pad_to": "longest", "pad_values": VALUES},
    "map, workers": {
        "mesh": DP,
        "pad_to": "longest",
        "pad_values": VALUES,
        "workers": 2,
    },
    "map, tail fill": {
        "mesh": DP,
        "pad_to": "longest",
        "pad_values": VALUES,
        "tail": "fill",
    },
    "list": {
        "mesh": DP,
        "pad_to": "longest",
        "pad_values": BY_POSITION,
        "form": "list",
    },
    "tensor": {
        "mesh": DP,
        "pad_to": "longest",
        "pad_values": {0: 0},
        "form": "tensor",
    },
    "stream": {
        "mesh": DP,
        "stream": True,
        "pad_to": "longest",
        "pad_values": VALUES,
    },
    "stream, workers": {
        "mesh": DP,
        "stream": True,
        "pad_to": "longest",
        "pad_values": VALUES,
        "workers": 2,
        "size": 8,
    },
    "sizes": {
        "mesh": DP,
        "pad_to": [16, 4, 8],
        "pad_values": {"ids": 0, "labels": -100, "weights": 0.5, "mask": 0},
    },
    "one size": {"mesh": DP, "pad_to": 16, "pad_values": VALUES},
    "too long": {"mesh": DP, "pad_to": [4, 8], "pad_values": VALUES},
    "no value": {
        "mesh": DP,
        "pad_to": "longest",
        "pad_values": {"ids": 0, "weights": 0.5, "mask": 0},
    },
    "no such field": {"mesh": DP, "pad_to": "longest", "pad_values": {"id": 0}},
    "not padded": {"mesh": DP},
    "not padded, workers": {"mesh": DP, "workers": 2},
    "not padded, stream": {"mesh": DP, "stream": True},
    "no number": {
        "mesh": DP,
        "pad_to": "longest",
        "pad_values": {**VALUES, "ids": 0.5},
    },
    "none on a rank": {
        "mesh": DP,
        "pad_to": "longest",
        "pad_values": VALUES,
        "odd": "none",
    },
    "texts on a rank": {
        "mesh": DP,
        "pad_to": "longest",
        "pad_values": VALUES,
        "odd": "texts",
    },
    "replicas": {"mesh": MP_DP, "pad_to": "longest", "pad_values": VALUES},
    "split too": {
        "mesh": DP_SEP,
        "pad_to": [4, 8, 16],
        "pad_values": VALUES,
        "sep": True,
    },
    "split balanced": {
        "mesh": DP_SEP,
        "pad_to": [4, 8, 16],
        "pad_values": VALUES,
        "balanced": True,
    },
}


def document(number):
    """Return a sample: its ids, labels and weights, and which of its words see which."""
    length = LENGTHS[number]
    ids = np.arange(length) + 100 * number + 1
    return {
        "ids": ids,
        "labels": -ids,
        "mask": np.tri(length, dtype=bool),
        "weights": (ids / 7).astype("float32"),
    }


def padded(samples):
    """Return a batch of samples, as a plain program makes it: each field padded to the longest of them."""
    longest = max(len(sample["ids"]) for sample in samples)
    batch = {}
    for key, value in VALUES.items():
        kind = samples[0][key]
        batch[key] = np.full(
            [len(samples), *[longest] * kind.ndim], value, kind.dtype
        )
        for row, sample in enumerate(samples):
            batch[key][
                (row, *[slice(0, size) for size in sample[key].shape])
            ] = sample[key]
    return batch


class Collate:
    """A collate_fn of some form, that can be sent to workers."""

    def __init__(self, form, odd=None):
        self.form, self.odd, self.calls = form, odd, 0

    def __call__(self, samples):
        batch, self.calls = padded(samples), self.calls + 1
        if self.odd and self.calls == 3:
            batch["weights"] = (
                None if self.odd == "none" else ["text"] * len(samples)
            )
        return (
            batch
            if self.form is dict
            else list(batch.values())
            if self.form == "list"
            else batch["ids"]
        )


def collate_fn(form, odd=None):
    return Collate(form, odd)
