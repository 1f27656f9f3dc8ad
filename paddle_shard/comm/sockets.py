"""How does a forked child not keep the connections of its parent open?"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_making = threading.RLock()
"""Held while a socket is made and recorded, and while this process is forked."""


def noted(make: Callable[[], socket.socket]) -> socket.socket:
    """Return a socket that a forked child closes: a worker that held one would hide the death of its rank.

    Args:
        make: Makes the socket; it must not block.
    """
    with _making:
        made = make()
        _sockets.add(made)
    return made


def _leave_sockets_to_the_parent() -> None:
    for found in list(_sockets):
        with contextlib.suppress(OSError):
            found.close()
    _making.release()


os.register_at_fork(
    before=_making.acquire, after_in_parent=_making.release, after_in_child=_leave_sockets_to_the_parent
)
