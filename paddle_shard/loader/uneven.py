"""Did the parts of a stream end so far apart that much was padding, or dropped?"""

from __future__ import annotations

from paddle_shard.delivery.setup import PassSetup
from paddle_shard.inputs.stream_setup import StreamSetup
from paddle_shard.say_once import say_once
from paddle_shard.sources.shards import ShardSource
from paddle_shard.stages.stage import Opening, Stage

_REPEAT = "With tail='repeat' or num_batches= parts that have ended are read again."
_COUNT = (
    "Files that are counted (counts=True; for tars index=, made by `python -m paddle_shard.cli.index_shards`) are cut "
    f"into equal parts. Else fewer parts (in_parts()), or many files of one size, make them more alike. {_REPEAT}"
)
_FILTERED = (
    "The source cuts equal parts, and what stands behind it (a filter, a batch) has left more of some than of others: "
    f"fewer parts (in_parts()), or a shuffle in front of it, make them more alike. {_REPEAT}"
)
_OWN = f"Give every data rank as much data. {_REPEAT}"


def say_if_uneven(setup: PassSetup, epoch: int) -> None:
    """Log, at the end of a loader's first pass, how many of this rank's rows were padding, or what was dropped."""
    stream, stats = setup.source.stream, setup.stats
    plan = None if stream is None else stream.batches.plan
    if stream is None or plan is None or plan.repeats or stats.total.batches != stats.epoch.batches:
        return
    counts, rank = stats.epoch, setup.own_layout.global_rank
    rows = counts.samples + counts.padding + counts.skipped
    if plan.ending.pads and counts.batches and counts.padding * counts.batches >= rows:  # a whole batch
        say_once(
            "tail='pad': %d of the %d rows that rank %d was given in this epoch are padding, because the stream's %d "
            "parts end at different times. %s",
            counts.padding,
            rows,
            rank,
            plan.num_parts,
            _remedy(stream),
        )
    stage = stream.stage
    if plan.ending.drops and rank == 0 and stage.num_shards is not None and not stream.batches.knows_length:
        parts = tuple(range(plan.num_parts))
        share = _dropped(stage, Opening(parts=parts, num_parts=len(parts), seed=setup.options.seed, epoch=epoch))
        if share is None or share > 0.01:
            say_once(
                "tail='drop': the epoch had %d batches, %d rows, and ended with the shortest of the stream's %d parts; "
                "the rest of the others was dropped: %s. %s",
                counts.batches,
                counts.batches * plan.batch_size,
                plan.num_parts,
                "how much is not known" if share is None else f"about {share:.0%} of the data, by its files' sizes",
                _remedy(stream),
            )


def _remedy(stream: StreamSetup) -> str:
    if stream.batches.split_over is not None:
        return _OWN
    source = stream.stage.source
    parts = Opening(parts=(0,), num_parts=1)
    return _COUNT if isinstance(source, ShardSource) and source.lengths(parts) is None else _FILTERED


def _dropped(stage: Stage, opening: Opening) -> float | None:
    """Return which share of the bytes lies behind the end of the shortest part; None if that is not known."""
    source = stage.source
    sizes = source.part_sizes(opening) if isinstance(source, ShardSource) else None
    return 1 - min(sizes) * len(sizes) / sum(sizes) if sizes and sum(sizes) else None
