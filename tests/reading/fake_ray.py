"""The few calls of Ray that `extras/ray_readers.py` makes, in this process: a test decides what happens, and when."""

import pickle
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

ERROR = type("RayError", (Exception,), {})
DIED = type("ActorDiedError", (ERROR,), {})
LOST = type("ActorUnavailableError", (ERROR,), {})
FAILED = type("RayTaskError", (ERROR,), {})


class Pickler(pickle.Pickler):
    dispatch_table = {}


class Ref:
    """What a call will have returned."""

    def __init__(self, call=None):
        self.call, self.done, self.value, self.error = call, False, None, None


class Actor:
    """An actor of the fake cluster; its class is called in this process."""

    def __init__(self, cls, args, options):
        self.cls, self.args, self.options = cls, args, options
        self.made, self.alive, self.queue = None, True, []

    def __getattr__(self, name):
        def remote(*args):
            ref = Ref((name, args))
            if self.alive:
                self.queue.append(ref)
            else:
                ref.error = DIED("it was dead already")
            return ref

        return SimpleNamespace(remote=remote)

    @property
    def unanswered(self):
        return [ref for ref in self.queue if ref.call[0] == "read"]

    def place(self):
        self.made = self.made or self.cls(*self.args)

    def answer(self):
        """Answer the first call."""
        if self.made is None or not self.alive or not self.queue:
            return
        ref = self.queue.pop(0)
        try:
            ref.value, ref.done = (
                getattr(self.made, ref.call[0])(*ref.call[1]),
                True,
            )
        except Exception as error:
            ref.error = FAILED(f"{type(error).__name__}: {error}")

    def lose(self):
        """It is out of reach, but alive."""
        for ref in self.queue:
            ref.error = LOST("its node does not answer")
        self.queue = []

    def die(self, why="it was killed"):
        self.alive = False
        for ref in self.queue:
            ref.error = DIED(why)
        self.queue = []


class FakeRay(ModuleType):
    """A module `ray`. `turn` is called with it at each `wait`, and says what happens meanwhile."""

    def __init__(self, turn):
        super().__init__("ray")
        self.turn, self.actors, self.waits = turn, [], 0
        self.cloudpickle = SimpleNamespace(
            dumps=pickle.dumps, CloudPickler=Pickler
        )
        self.exceptions = SimpleNamespace(RayError=ERROR, RayTaskError=FAILED)
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")

    @property
    def living(self):
        return [actor for actor in self.actors if actor.alive]

    connected = True

    def is_initialized(self):
        return self.connected

    def init(self, address):
        self.connected = True

    def put(self, value):
        ref = Ref()
        ref.value, ref.done = value, True
        return ref

    def get(self, ref):
        if ref.error is not None:
            raise ref.error
        assert ref.done
        for array in ref.value if isinstance(ref.value, list) else ():
            array.setflags(write=False)
        return ref.value

    def wait(self, refs, timeout, num_returns=1):
        if timeout:
            self.waits += 1
            assert self.waits < 2_000_000, "it waits for ever"
            self.turn(self)
        ready = [ref for ref in refs if ref.done or ref.error is not None][
            :num_returns
        ]
        return ready, [ref for ref in refs if ref not in ready]

    def remote(self, cls):
        def options(**given):
            return SimpleNamespace(
                remote=lambda *args: (
                    self.actors.append(Actor(cls, args, given))
                    or self.actors[-1]
                )
            )

        return SimpleNamespace(options=options)

    def kill(self, actor):
        actor.die()

    def available_resources(self):
        return {"CPU": 0.0}


def all_answer(ray):
    """Every actor is placed, and answers one call."""
    for actor in ray.living:
        actor.place()
        actor.answer()


@contextmanager
def faked(monkeypatch, turn=all_answer):
    ray = FakeRay(turn)
    monkeypatch.setitem(sys.modules, "ray", ray)
    yield ray
