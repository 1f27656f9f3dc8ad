"""Planted defects: weaker rules, of which the lives of a seed must catch each."""

from dataclasses import replace

from paddle_shard.loader.iteration import ShardIterator
from paddle_shard.loader.loader import ShardDataloader
from paddle_shard.plan.skips import steps_of_epoch
from paddle_shard.plan.state import LoaderState
from paddle_shard.reading.batch import Batch
from paddle_shard.run.progress import IteratorProgress
from paddle_shard.run.run import Run


def remembers_one_batch_less(self, step, ids, lost):
    self.late = self.position
    deliver(self, step, ids, lost)


def is_one_batch_late(self):
    """The state is that of before the newest batch."""
    now = self.position
    self.position = getattr(self, "late", now)
    try:
        return state(self)
    finally:
        self.position = now


def moves_the_epoch(self):
    """A loop that is left moves the run to the next epoch."""
    progress = self._progress
    is_left = (
        not progress.closed
        and progress.position.steps
        and not progress.position.ended
    )
    close(self)
    if is_left:
        self._setup.run._counter.move_to(self.epoch + 1)


def rounds_down(self, saved, override):
    """A resume begins at a whole batch of the new size."""
    resume_from(self, saved, override)
    size = self._source.batch_size
    start = self._resumed
    self._resumed = replace(start, samples=start.samples // size * size)


def follows_the_newest(self, start):
    """An iterator moves the run when it is made."""
    self._newest = begin(self, start)
    return self._newest


def forgets_the_position(self, epoch, **others):
    """`set_epoch` of the loaded epoch begins it anew."""
    self._run._resumed = None
    set_epoch(self, epoch, **others)


def counts_skipped_rows(self):
    """A sample that could not be read counts as valid."""
    is_valid, is_skipped = self._masks()
    return is_valid | is_skipped


def counts_padding(self, step, ids, lost):
    """The certificate counts rows of padding."""
    deliver(self, step, ids if step.valid is None else step.ids, lost)


def accepts_any_schedule(self, fingerprint):
    """Schedules may differ before the position, too."""
    cut = before_position(self, fingerprint)
    schedules = ("mixture", "skip_steps", "packed")
    return {name: value for name, value in cut.items() if name not in schedules}


def skips_steps_of_the_epoch(self, start):
    """Steps to skip are counted from the beginning of each epoch."""
    return steps_of_epoch(self._skip_steps, 0)


def keeps_the_position(self, progress, *skipped):
    """Every pass over the loaded epoch begins at the loaded position."""
    start = self._resumed
    finished(self, progress, *skipped)
    self._resumed = start


def moved_by_old_iterators(self, saved, override):
    """Iterators that were made before a load move the run."""
    resume_from(self, saved, override)
    self._first_number = 0


def forgets_the_cut(self, saved, override):
    """The parts of a stream, and the steps before, are those of the new batch size."""
    resume_from(self, saved, override)
    self._resumed = replace(self._resumed, segments=())


def forgets_the_end(self, saved, override):
    """An epoch that has ended is served on, if another batch size leaves something."""
    resume_from(self, saved, override)
    self._resumed = replace(self._resumed, ended=False)


def forgets_what_was_delivered(self, saved, override):
    """The certificate begins with the load."""
    resume_from(self, saved, override)
    self._deliveries = {}


deliver = IteratorProgress.deliver
state = IteratorProgress.state
close = ShardIterator.close
resume_from = Run.resume_from
begin = Run.begin
set_epoch = ShardDataloader.set_epoch
before_position = LoaderState._before_position
finished = Run.finished

DEFECTS = {
    "is_one_batch_late": (
        IteratorProgress,
        {"deliver": remembers_one_batch_less, "state": is_one_batch_late},
    ),
    "moves_the_epoch": (ShardIterator, {"close": moves_the_epoch}),
    "rounds_down": (Run, {"resume_from": rounds_down}),
    "follows_the_newest": (Run, {"begin": follows_the_newest}),
    "forgets_the_position": (
        ShardDataloader,
        {"set_epoch": forgets_the_position},
    ),
    "counts_skipped_rows": (Batch, {"valid": counts_skipped_rows}),
    "counts_padding": (IteratorProgress, {"deliver": counts_padding}),
    "accepts_any_schedule": (
        LoaderState,
        {"_before_position": accepts_any_schedule},
    ),
    "skips_steps_of_the_epoch": (Run, {"skips": skips_steps_of_the_epoch}),
    "keeps_the_position": (Run, {"finished": keeps_the_position}),
    "moved_by_old_iterators": (Run, {"resume_from": moved_by_old_iterators}),
    "forgets_the_cut": (Run, {"resume_from": forgets_the_cut}),
    "forgets_the_end": (Run, {"resume_from": forgets_the_end}),
    "forgets_what_was_delivered": (
        Run,
        {"resume_from": forgets_what_was_delivered},
    ),
}
"""Name -> what is replaced where, and by what."""
