"""Planted defects: weaker rules, of which the simulation must catch each."""

from paddle_shard.ranks import protocol
from paddle_shard.ranks.decision import (
    END,
    NEVER,
    OK,
    Decision,
    RankProgress,
    decide,
)


def delivers_unasked(self, step):
    """What this rank can serve itself is delivered, agreed or not."""
    is_own = self.decision is None and step < self.progress.step
    return True if is_own else may_deliver(self, step)


def releases_a_batch(self):
    """Where all have announced n steps, the rest of a batch is thought to be safe."""
    found = tally_decide(self)
    if found.kind == OK:
        return Decision(found.step + found.step % protocol.BATCH, OK)
    return found


def notes_too_late(self, now):
    """A note is sent after the step that it is about."""
    found = send(self, now)
    return sorted(found, key=lambda message: message[0] == "note")


def ends_too_early(ranks):
    """The first event is final, whatever the others have not said of that step."""
    found = decide(ranks)
    if found.kind != OK:
        return found
    last = RankProgress(
        step=NEVER, exhausted=min(one.exhausted for one in ranks)
    )
    return decide([last, *(one for one in ranks if one.kind != OK)])


def keeps_padding_to_itself(self, now):
    """Steps without real rows are announced as real ones."""
    found = send(self, now)
    for message in found:
        if message[0] == "progress":
            message[6] = NEVER
    return found


def takes_one_end_for_all(ranks):
    """The pass ends where the first rank has no real rows, and not where the last one has none."""
    found = decide(ranks)
    first = min(one.exhausted for one in ranks)
    return (
        Decision(first, END) if first < NEVER and first <= found.step else found
    )


def forgets_early_notes(self, rank, number, step, note):
    """A note that comes before all ranks have opened the pass is sent at once, to ranks that do not know the pass."""
    self._outbox.append(["note", number, [rank], step, note])


def decides_with_whom_it_knows(self):
    """A pass is decided as soon as one rank has opened it."""
    ranks, self._ranks = self._ranks, self._ranks[:1]
    try:
        hub_decide(self)
    finally:
        self._ranks = ranks


def ignores_the_dead(self, message):
    """A loss is told to nobody but the hub's own rank."""
    if message[0] != "lost" or self.rank == 0:
        member_receive(self, message)


def forgets_who_leaves(self):
    """A rank leaves without a word."""
    self.is_closed = True


def posts_no_notes(self):
    """The table does not say how many notes were sent before a step."""
    if self.table is not None:
        progress = self.progress
        self.table.post(self.number, min(progress.step, progress.exhausted), 0)


def posts_too_much(self):
    """The step that is read next is on the table, too."""
    if self.table is not None:
        step = min(self.progress.step, self.progress.exhausted) + 1
        self.table.post(
            self.number, step, self._num_notes.get(self._member.rank, 0)
        )


def posts_what_is_not_sent(self):
    """The table shows steps whose notes may not be sent yet."""
    if self.table is not None:
        step = min(self.progress.step, self.progress.exhausted)
        num_notes = self._num_notes.get(self._member.rank, 0) + len(
            self._unconfirmed
        )
        self.table.post(self.number, step, num_notes)


def leaves_the_table_at_the_end(self):
    """The table is not read any more once the pass ends on some rank, which may be held in a collective."""
    return -1 if self._is_ending else announced_by_all(self)


def reads_what_was_not_compared(self):
    """The table is trusted before the hub has compared what the ranks have opened."""
    if self._is_ending or self.table is None:
        return -1
    return self.table.least(self.number, self._num_notes)


def shares_what_is_compared(self, member, terms):
    """A pass whose data is compared is on the table."""
    begin(self, member, terms)
    self.table = member.table
    self._post()


begin = protocol.Iteration.__init__
may_deliver = protocol.Iteration.may_deliver
send = protocol.Member.send
announced_by_all = protocol.Iteration._announced_by_all
tally_decide = protocol._Tally.decide
hub_decide = protocol.Hub._decide
member_receive = protocol.Member.receive

DEFECTS = {
    "delivers_unasked": (protocol.Iteration, {"may_deliver": delivers_unasked}),
    "releases_a_batch": (protocol._Tally, {"decide": releases_a_batch}),
    "notes_too_late": (protocol.Member, {"send": notes_too_late}),
    "ends_too_early": (protocol, {"decide": ends_too_early}),
    "keeps_padding_to_itself": (
        protocol.Member,
        {"send": keeps_padding_to_itself},
    ),
    "takes_one_end_for_all": (protocol, {"decide": takes_one_end_for_all}),
    "forgets_early_notes": (
        protocol.Hub,
        {"_on_note": forgets_early_notes},
    ),
    "decides_with_whom_it_knows": (
        protocol.Hub,
        {"_decide": decides_with_whom_it_knows},
    ),
    "ignores_the_dead": (protocol.Member, {"receive": ignores_the_dead}),
    "forgets_who_leaves": (protocol.Iteration, {"close": forgets_who_leaves}),
    "posts_no_notes": (protocol.Iteration, {"_post": posts_no_notes}),
    "posts_too_much": (protocol.Iteration, {"_post": posts_too_much}),
    "leaves_the_table_at_the_end": (
        protocol.Iteration,
        {"_announced_by_all": leaves_the_table_at_the_end},
    ),
    "posts_what_is_not_sent": (
        protocol.Iteration,
        {"_post": posts_what_is_not_sent},
    ),
    "reads_what_was_not_compared": (
        protocol.Iteration,
        {"_announced_by_all": reads_what_was_not_compared},
    ),
    "shares_what_is_compared": (
        protocol.Iteration,
        {"__init__": shares_what_is_compared},
    ),
}
"""Name -> what is changed, and what replaces its attributes."""
