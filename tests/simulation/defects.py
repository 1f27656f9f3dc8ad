"""Planted defects: weaker rules, of which the simulation must catch each."""

from paddle_shard.ranks import protocol
from paddle_shard.ranks.verdict import END, NEVER, OK, Decision, decide


def delivers_unasked(self, step):
    """What this rank can serve itself is delivered, agreed or not."""
    return (
        True
        if self.verdict is None and step < self.outlook.step
        else may_deliver(self, step)
    )


def releases_a_batch(self):
    """Where all have announced n steps, the rest of a batch is thought to be safe."""
    found = ballot_decide(self)
    if found.kind == OK:
        return Decision(found.step + found.step % protocol.BATCH, OK, found.so_far)
    return found


def notes_too_late(self):
    """A note is sent after the step that it is about."""
    found = reports(self)
    return [message for message in found if message[0] != "note"] + [
        m for m in found if m[0] == "note"
    ]


def ends_too_early(outlooks):
    """The first event is final, whatever the others have not said of that step."""
    found = decide(outlooks)
    return Decision(found.step, found.so_far, found.so_far)


def keeps_padding_to_itself(self):
    """Steps without real rows are announced as real ones."""
    found = reports(self)
    for message in found:
        if message[0] == "at":
            message[4] = NEVER
    return found


def takes_one_end_for_all(outlooks):
    """The pass ends where the first rank has no real rows, and not where the last one has none."""
    found = decide(outlooks)
    first = min(one.exhausted for one in outlooks)
    return Decision(first, END, END) if first < NEVER and first <= found.step else found


def forgets_early_notes(self, rank, number, step, payload):
    """A note that comes before all ranks have opened the pass is sent at once, to ranks that do not know the pass."""
    self.outbox.append(["note", number, step, rank, payload])


def decides_with_whom_it_knows(self):
    """A pass is decided as soon as one rank has opened it."""
    ranks, self._ranks = self._ranks, self._ranks[:1]
    try:
        hub_decide(self)
    finally:
        self._ranks = ranks


def compares_nothing(self, digest):
    """What was read is not sent."""


def ignores_the_dead(self, kind="", *content, now):
    """A loss is told to nobody but the hub's own rank."""
    if kind != "lost" or self.rank == 0:
        member_receive(self, kind, *content, now=now)


def names_the_relayed(self, ranks, what, timeout=None):
    """Who is silent behind a silent relay is named, too."""
    relayed = [rank for rank, relay in self._relays.items() if relay in ranks]
    lose(self, [*ranks, *relayed], what, timeout)


def forgets_who_leaves(self, now=0.0):
    """A rank leaves without a word."""
    self.is_closed = True


def drops_what_is_announced_in_a_wait(self):
    """A rank that waits sends nothing before a batch is full, and heartbeats carry nothing."""
    return self.outlook.step - self._sent[0] >= protocol.BATCH


def posts_no_notes(self):
    """The table does not say how many notes were sent before a step."""
    if self.table is not None:
        self.table.post(self.number, min(self.outlook.step, self.outlook.exhausted), 0)


def posts_too_much(self):
    """The step that is read next is on the table, too."""
    if self.table is not None:
        self.table.post(
            self.number,
            min(self.outlook.step, self.outlook.exhausted) + 1,
            self._num_heard.get(self.rank, 0),
        )


@property
def leaves_the_table_at_the_end(self):
    """The table is not read any more once the pass ends on some rank, which may be held in a collective."""
    return not self._is_ending and reads_table.fget(self)


def posts_what_is_not_sent(self):
    """The table shows steps whose notes may not be sent yet."""
    if self.table is not None:
        num_notes = self._num_heard.get(self.rank, 0) + len(self._not_heard)
        self.table.post(
            self.number, min(self.outlook.step, self.outlook.exhausted), num_notes
        )


@property
def reads_what_was_not_compared(self):
    """The table is trusted before the hub has compared what the ranks have opened."""
    return not self._is_ending and self.table is not None and self.table.is_shared


def shares_what_is_compared(self, state):
    """A pass whose data is compared is on the table."""
    state.table = self._table
    state.post()


may_deliver = protocol.PassState.may_deliver
ballot_decide = protocol._Ballot.decide
reports = protocol.PassState.reports
hub_decide = protocol.Hub._decide
member_receive = protocol.Member.receive
lose = protocol.Hub.lose
reads_table = protocol.PassState._reads_table

DEFECTS = {
    "delivers_unasked": (protocol.PassState, {"may_deliver": delivers_unasked}),
    "releases_a_batch": (protocol._Ballot, {"decide": releases_a_batch}),
    "notes_too_late": (protocol.PassState, {"reports": notes_too_late}),
    "ends_too_early": (protocol, {"decide": ends_too_early}),
    "keeps_padding_to_itself": (
        protocol.PassState,
        {"reports": keeps_padding_to_itself},
    ),
    "takes_one_end_for_all": (protocol, {"decide": takes_one_end_for_all}),
    "forgets_early_notes": (protocol.Hub, {"_take_note": forgets_early_notes}),
    "decides_with_whom_it_knows": (
        protocol.Hub,
        {"_decide": decides_with_whom_it_knows},
    ),
    "ignores_the_dead": (protocol.Member, {"receive": ignores_the_dead}),
    "forgets_who_leaves": (protocol.PassState, {"close": forgets_who_leaves}),
    "posts_no_notes": (protocol.PassState, {"post": posts_no_notes}),
    "posts_too_much": (protocol.PassState, {"post": posts_too_much}),
    "leaves_the_table_at_the_end": (
        protocol.PassState,
        {"_reads_table": leaves_the_table_at_the_end},
    ),
    "posts_what_is_not_sent": (protocol.PassState, {"post": posts_what_is_not_sent}),
    "reads_what_was_not_compared": (
        protocol.PassState,
        {"_reads_table": reads_what_was_not_compared},
    ),
    "shares_what_is_compared": (protocol.Member, {"_share": shares_what_is_compared}),
}
"""Name -> what is changed, and what replaces its attributes."""
