"""How does somebody who watches see how far the epoch is?"""

from __future__ import annotations

from typing import Any

from paddle_shard.errors import MissingDependencyError


def import_tqdm() -> Any:
    """Return tqdm's bar.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise MissingDependencyError(
            "progress=True needs tqdm: pip install 'paddle_shard[progress]', or leave progress out."
        ) from None
    return tqdm


class ProgressBar:
    """A bar over the batches of one epoch, with the share of the time that is spent waiting for them."""

    def __init__(self, epoch: int, num_steps: int | None, steps: int) -> None:
        """Show it.

        Args:
            epoch: Which.
            num_steps: Of the whole epoch; None if that is not known.
            steps: Delivered before.
        """
        self._bar = import_tqdm()(desc=f"epoch {epoch}", total=num_steps, initial=steps, unit="batch")

    def step(self, starved: float, batches: int) -> None:
        """Go on by some batches."""
        self._bar.set_postfix_str(f"{starved:.0%} waiting for data", refresh=False)
        self._bar.update(batches)

    def close(self) -> None:
        """Leave it as it is; safe to call again."""
        self._bar.close()
