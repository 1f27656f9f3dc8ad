"""Batches of similar lengths, by a batch sampler of your own: less padding, every sample once an epoch.

    python demos/length_buckets.py

It prints how much of the batches is padding, with and without the buckets, leaves an epoch in its middle and resumes
it: the rest has the batches that were missing. The class is a recipe to copy.
"""

from itertools import islice

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard


class LengthBuckets:
    """Batches of similar lengths; every sample once an epoch."""

    def __init__(self, lengths, max_tokens, multiple_of=1, window=8192, seed=0):
        self.lengths = np.asarray(lengths)
        self.max_tokens = max_tokens
        self.multiple_of = multiple_of
        self.window = window * multiple_of
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(len(self.lengths))
        for start in range(0, len(order), self.window):
            samples = order[start : start + self.window]
            samples = samples[np.argsort(self.lengths[samples], kind="stable")]
            batches = []
            while len(samples):
                tokens = self.lengths[samples] * np.arange(1, len(samples) + 1)
                num_rows = np.count_nonzero(tokens <= self.max_tokens)
                num_rows -= num_rows % self.multiple_of
                num_rows = max(num_rows, self.multiple_of)
                batches.append(samples[:num_rows].tolist())
                samples = samples[num_rows:]
            short = [batches.pop()] if len(batches[-1]) % self.multiple_of else []
            rng.shuffle(batches)
            yield from batches + short


class Texts(paddle.io.Dataset):
    """Token ids of log-normal lengths."""

    def __init__(self, num_texts=2000):
        rng = np.random.default_rng(0)
        self.lengths = rng.lognormal(4, 0.8, num_texts).astype(np.int64) + 1

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return np.full(self.lengths[index], index)


def collate(texts):
    longest = max(map(len, texts))
    return np.array([np.pad(text, (0, longest - len(text))) for text in texts])


def make_loader(dataset, **batches):
    dataloader = paddle.io.DataLoader(dataset, collate_fn=collate, **batches)
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    return paddle_shard.shard_dataloader(dataloader, mesh, shard_dims="dp")


def make_buckets(dataset):
    sampler = LengthBuckets(dataset.lengths, max_tokens=4096, window=512)
    return make_loader(dataset, batch_sampler=sampler)


def read(loader):
    return [batch._local_value().numpy() for batch in loader]


def share_of_padding(dataset, batches):
    return 1 - dataset.lengths.sum() / sum(batch.size for batch in batches)


def main():
    dataset = Texts()
    shuffled = read(make_loader(dataset, batch_size=32, shuffle=True))
    whole = read(make_buckets(dataset))
    print(f"shuffled: {share_of_padding(dataset, shuffled):.1%} padding")
    print(f"buckets: {share_of_padding(dataset, whole):.1%} padding")
    assert share_of_padding(dataset, whole) < share_of_padding(dataset, shuffled) / 2

    stopped = make_buckets(dataset)
    with iter(stopped) as batches:
        first = read(islice(batches, 5))
        state = stopped.state_dict()
    resumed = make_buckets(dataset)
    resumed.load_state_dict(state)
    for batch, expected in zip(first + read(resumed), whole, strict=True):
        assert np.array_equal(batch, expected)
    print(f"resumed after 5 of {len(whole)} batches: the same")


if __name__ == "__main__":
    main()
