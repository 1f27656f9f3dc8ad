"""Which values differ between ranks although they should be the same?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MOST_RANKS = 8


def described(facts: Mapping[str, Any]) -> str:
    """Return facts (name -> value, each a short text) as a text for `differences`."""
    return json.dumps({name: str(value) for name, value in facts.items()})


def differences(said: Mapping[int, str]) -> str:
    """Return what differs, with every value and the global ranks that have it.

    Args:
        said: Global rank -> the result of `described` on that rank.

    Examples:
        >>> print(differences({0: described({"seed": 0, "rows": 8}), 1: described({"seed": 1, "rows": 8})}))
        seed: 0 on global rank 0, 1 on global rank 1
    """
    facts = {rank: _facts(text) for rank, text in said.items()}
    names = list(dict.fromkeys(name for of_rank in facts.values() for name in of_rank))
    found = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, of_rank in facts.items():
            holders.setdefault(of_rank.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            found.append(f"{name}: " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in holders.items()))
    return "; ".join(found)


def _facts(text: str) -> dict[str, str]:
    try:
        return dict(json.loads(text))
    except ValueError:  # no facts, or cut off because they were too long
        return {"loader": text}


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"global rank {ranks[0]}"
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"global ranks {', '.join(map(str, ranks[:_MOST_RANKS]))}{more}"
