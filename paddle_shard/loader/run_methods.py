"""What can a user ask of a run: its position, its order, what it has drawn and delivered?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from paddle_shard.plan.certificate import Certificate
from paddle_shard.plan.mixture import Drawn
from paddle_shard.plan.shard_plan import ShardPlan, Where
from paddle_shard.position.run import Run


class RunMethods:
    """The methods of a loader that are about its run."""

    _run: Run

    @property
    def plan(self) -> ShardPlan | None:
        """The order of the run, without the data; None if a sampler of your own decides it."""
        return self._run.plan

    @property
    def epoch(self) -> int:
        """The epoch that the next iterator will serve."""
        return self._run.epoch

    def set_epoch(self, epoch: int, **others: Any) -> None:
        """Choose the epoch of the iterators that are made from now on.

        Args:
            epoch: 0 or more. The order is a function of the epoch and the seed.
            others: Further arguments for the `set_epoch` of a sampler of your own.
        """
        self._run.set_epoch(epoch, others)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run: a small dict for JSON, `paddle.save` or a checkpoint.

        It counts the batches that the newest iterator has delivered, not those that were prefetched. It is local: no
        rank waits for another. After the last batch of an epoch it is the end of that epoch; after the
        `StopIteration` it is the beginning of the next. Save it beside the model, and give it to `load_state_dict` of
        a loader on any mesh, with any number of workers and any batch size.
        """
        return self._run.state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, override: Collection[str] = ()) -> None:
        """Resume from a saved position: iterators of its epoch begin with the next sample.

        The position is used until one of them reaches its end. Later iterators over the same epoch serve all of it.
        Iterators that were made before the load no longer move the run.

        Args:
            state: A result of `state_dict`, of this run or another.
            override: Names of fields of the state's fingerprint that may differ from this loader's.

        Raises:
            StateError: The state is damaged, of another version, or of a run with another order.
        """
        self._run.resume_from(state, override)

    def where(self, *, sample: int | tuple[str, int], epoch: int | None = None) -> Where | list[Where] | None:
        """Return where a sample is delivered; see `ShardPlan.where`.

        Of a `Mixture`, a sample may be delivered several times in an epoch, or not at all: it is a list then.

        Args:
            sample: Index of the sample in the data set; of a `Mixture`, (name of the source, index in it).
            epoch: The epoch; None: the current one.
        """
        return self._run.where(sample, epoch)

    def set_weights(self, weights: Mapping[str, float]) -> int:
        """Mix the sources of a `Mixture` with other weights, from the first step that no rank has requested yet.

        The call is collective: every rank calls it, at the same step, with the same weights. Steps that were
        prefetched keep the old weights; a schedule of the `Mixture` ends here. The switch is part of the saved state,
        so a resumed or replayed run makes it at the same sample.

        Args:
            weights: Name -> a number >= 0, for every source; see `Mixture`.

        Returns:
            The sample of the run from which the weights hold.

        Raises:
            ArgumentError: The data set is no `Mixture`, the weights do not fit it, or the ranks gave others; on every
                rank.

        Examples:
            >>> loader.set_weights({"web": 0.5, "code": 0.5})  # doctest: +SKIP
            1024
        """
        return self._run.set_weights(weights)

    def sources(self) -> Mapping[str, Drawn]:
        """Return what the run has drawn of each source of a `Mixture`, up to the last batch that was delivered.

        Samples that you leave out (`skip`), and those that the tail of an earlier epoch dropped, keep their place in
        the mixture, so they count as drawn. `certificate().sources` counts what an epoch delivers.

        Returns:
            Name -> what was drawn, with the attributes `drawn`, `share`, `weight` and `epochs`, over all ranks and
            epochs of the run; no rank waits for another.

        Raises:
            ArgumentError: The data set is no `Mixture`.
        """
        return self._run.sources()

    def skip(self, *, steps: Iterable[int] = (), samples: Iterable[Any] = (), epoch: int | None = None) -> None:
        """Leave out steps or samples: they are never read. It holds for iterators that are made afterwards.

        A step that is left out is passed over. A sample that is left out is a row that is not `valid`, and holds the
        data of another sample; a batch of which nothing is left is passed over. What is left out is in the saved state,
        also for other meshes and batch sizes, and in the certificate as "skipped by the user". It cannot be taken back
        in this loader; `load_state_dict` adds what the state leaves out. Every rank must leave out the same.

        Args:
            steps: Steps of the epoch, as the loader would make them now: not those that were delivered.
            samples: Indices in the data set, in every epoch; of a `Mixture`, (name of the source, index in it).
            epoch: The epoch of the steps; None: the current one.

        Raises:
            ArgumentError: There is no such step or sample, a step was delivered, an iterator is open, or the data is a
                stream or split already.

        Examples:
            >>> loader.load_state_dict(state)  # doctest: +SKIP
            >>> loader.skip(steps=range(1200, 1230))  # doctest: +SKIP
        """
        self._run.skip(steps, samples, epoch)

    def certificate(self) -> Certificate:
        """Return a proof of which samples the run has delivered in the epoch of its last batch.

        Right after a load, that is the epoch of the loaded state. `set_epoch` does not change it until a batch of the
        new epoch is delivered. In the middle of an epoch, the certificate lists what is still missing.

        The call is collective: every rank calls it, at the same step. It counts every batch of the epoch that any
        iterator of this loader has delivered since the loader was made or has loaded a state, and what that state
        says of the epoch: samples that were delivered before the stop, also on another mesh or with another batch
        size. An epoch that was left and begun again, two iterators over it at once, or a `next(iter(loader))` to see a
        batch have delivered samples twice, so the certificate is not exact. Call it before each `state_dict` that
        other ranks may load, so that the state knows what all ranks have delivered.

        With a sampler of your own, it proves that each sample was delivered as often as the sampler drew it, to one
        data rank each time, up to the end of the sampler, and that all ranks drew alike. It cannot know what the
        sampler should have drawn, nor what the tail dropped.

        Raises:
            ArgumentError: Of streams, of data sets of whole batches, and where a sampler of your own splits the data,
                samples have no number that all ranks know.
        """
        return self._run.certificate()
