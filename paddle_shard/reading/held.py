"""What do a data set and a collate function hold, of which workers have copies?"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import paddle.io

from paddle_shard.say_once import say_once

Held = dict[tuple[str, str], Any]
"""(type of an object, name of its attribute) -> the value."""

_DEEPEST, _MOST_INSIDE = 4, 16
"""How many data sets around another are looked into, and how many side by side."""
_BY_VALUE = (bool, int, float, complex, str, bytes)
"""Of other types, what counts is which object it is: one that is changed in place looks the same."""


def held_by(*objects: Any) -> Held:
    """Return the attributes of a data set, of those in it, of a callable object, and what a function was bound to."""
    found: Held = {}
    for owner, name, value in (entry for one in objects for entry in _walked(one, _DEEPEST)):
        while (type(owner).__name__, name) in found:  # of several of one type
            name += "'"
        found[type(owner).__name__, name] = value
    return found


def _walked(one: Any, deepest: int) -> Iterator[tuple[Any, str, Any]]:
    held: dict[str, Any] = dict(vars(one)) if hasattr(one, "__dict__") else {}
    if isinstance(one, partial):
        held |= {"func": one.func, **{str(at): value for at, value in enumerate(one.args)}, **one.keywords}
    if isinstance(one, MethodType):
        yield from _walked(one.__self__, deepest)
    names = getattr(getattr(one, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(one, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # it is not bound yet
            held[name] = cell.cell_contents
    for name, value in held.items():
        yield one, name, value
        inside = value[:_MOST_INSIDE] if isinstance(value, list | tuple) else [value]
        for other in inside if deepest else ():
            if isinstance(other, paddle.io.Dataset | partial) or (isinstance(one, partial) and callable(other)):
                yield from _walked(other, deepest - 1)


def changed(before: Held, now: Held) -> str:
    """Return the first attribute that was set since, such as "`epoch` of Images"; "" if there is none."""
    for at in now.keys() | before.keys():
        one, other = before.get(at), now.get(at)
        if one is not other and not (type(one) is type(other) and isinstance(one, _BY_VALUE) and one == other):
            return f"`{at[1]}` of {at[0]}"
    return ""


def say_if_it_draws_alone(held: Mapping[tuple[str, str], Any]) -> None:
    """Log which generators are the user's own: their numbers are not those of a sample."""
    own = [
        f"`{name}` of {owner}"
        for (owner, name), value in held.items()
        if isinstance(value, random.Random | np.random.Generator | np.random.RandomState)
        or (type(value).__name__ == "Generator" and type(value).__module__.startswith("torch"))
    ]
    if own:
        say_once(
            f"{' and '.join(own)}: a random generator of your own, of which each worker has a copy. What is drawn from "
            "it while samples are read or collated may be the same in each epoch and worker, is another with other "
            "workers, and is not repeated by a run that is resumed. Draw from the global generators of numpy, Python, "
            "Paddle or torch, which are seeded for each sample; a collate_fn's, for each batch."
        )
