"""The record of one worker: its state, what was sent to it, what it has answered. The package's docstring draws it."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from ..arrays.layout import Layout
from ..host.sections import Section
from .connection import Connection


class State(enum.Enum):
    """What a worker is to the sender."""

    ABSENT = "it has not connected"
    WAITING = "it has connected, and there is no update for it yet"
    READY = "it gets updates"
    LEFT = "it has shut down"
    DEAD = "its process ended, or the relay of its machine does not respond"


class Event(enum.Enum):
    """What changes a worker's record."""

    CONNECTED = "a process connects; nothing was sent to this worker since the last one left"
    WITHDREW = "that process ends, or gives up, before anything was sent"
    STARTED = "it gets its first update"
    ACK = "it has applied a version"
    ERROR = "it could not apply a version (0: not even the first)"
    LEFT = "it shuts down in order"
    DIED = "its process has ended, or the relay of its machine does not respond"
    RESUMED = "that relay responds again"


class Report(NamedTuple):
    """An event, as a relay sends it to the sender."""

    event: Event
    worker: int
    version: int = 0
    text: str = ""


@dataclass(eq=False)
class Worker:
    """One worker. The sender has a record of each; a relay has one of each worker of its machine.

    Attributes:
        index: the worker's.
        relay: rank that passes on its updates; None if it connects to the publisher of this process.
        state, reason: whether it gets updates; why it left or died.
        layout, packed: of what it gets, and the same as receivers get it; kept by the sender only.
        sent, acked, answered: versions: sent last, acknowledged last, and acknowledged or reported as failed last.
        unreported: why it died before it answered, until that is raised: another process may have replaced it.
        pid, connection: of its process.
        latest: where the last update sent to it is, until it has left.
        unread: version -> where it is, of updates that it has not answered.
        deferred: too many of these: it gets the newest when it answers.
    """

    index: int
    relay: int | None = None
    state: State = State.ABSENT
    reason: str = ""
    layout: Layout | None = None
    packed: bytes = b""
    sent: int = 0
    acked: int = 0
    answered: int = 0
    unreported: str = ""
    pid: int = 0
    connection: Connection | None = None
    latest: Section | None = None
    unread: dict[int, Section] = field(default_factory=dict)
    deferred: bool = False

    @property
    def gone(self) -> bool:
        """True if it is not sent to."""
        return self.state in (State.LEFT, State.DEAD)

    def apply(self, event: Event, version: int = 0, text: str = "") -> None:
        """The only place where the state and the versions that it has answered change.

        Args:
            text: why it died.
        """
        if event is Event.CONNECTED:
            self.state, self.answered = State.WAITING, self.sent  # another process: it owes no answer
        elif event is Event.WITHDREW:
            self.state = State.ABSENT
        elif event is Event.STARTED:
            self.state, self.acked, self.answered = State.READY, 0, 0
        elif event is Event.RESUMED:
            self.state = State.READY
        elif event is Event.ACK:
            self.acked = max(version, self.acked)
            self.answered = max(version, self.answered)
        elif event is Event.ERROR:
            self.answered = max(version or self.sent, self.answered)
        elif event is Event.LEFT:
            self.state, self.reason = State.LEFT, State.LEFT.value
        elif event is Event.DIED:
            if self.answered < self.sent:
                self.unreported = text
            self.state, self.reason = State.DEAD, text
