"""The record of one worker: its state, what was sent to it, what it has answered. The package's docstring draws it."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from mpi_util.arrays.layout import Layout
from mpi_util.errors import WorkerLeftError
from mpi_util.ranks.identity import Role
from mpi_util.ranks.state import state

from .connection import Connection
from .sections import Section


class State(enum.Enum):
    """What a worker is to the sender."""

    ABSENT = "it has not connected, or there is no update for it yet"
    READY = "it gets updates"
    LEFT = "it has shut down"
    DEAD = "its process ended, or the relay of its machine did"


class Event(enum.Enum):
    """What changes a worker's record, and the state to which it leads; None: it stays as it is."""

    CONNECTED = "a process connects, and is this worker from now on", State.ABSENT
    STARTED = "it gets its first update", State.READY
    ACK = "it has applied a version", None
    ERROR = "it could not apply a version (0: not even the first)", None
    REFUSED = "a process is refused as this worker, which there may not be", None
    LEFT = "it shuts down in order", State.LEFT
    DIED = "its process has ended, or the relay of its machine has", State.DEAD


def name_of(model_id: str | None) -> str:
    """The model, in messages."""
    return f"the model '{model_id}'" if model_id is not None else "the model"


def left(text: str) -> WorkerLeftError:
    """The error of a side whose other one has ended. In a job mpi_fork's parent names that one first."""
    error = WorkerLeftError(text)
    error.silent = bool(state(Role).job)
    return error


class Report(NamedTuple):
    """An event; a relay sends it to the sender. text: why it died, was refused, or could not apply a version."""

    event: Event
    worker: int
    version: int = 0
    text: str = ""


@dataclass(eq=False)
class Worker:
    """One worker. The sender has a record of each; a relay has one of each worker of its machine."""

    index: int
    relay: int | None = None  # rank that passes on its updates; None: it connects to this process's publisher
    state: State = State.ABSENT
    reason: str = ""  # why it is in this state
    layout: Layout | None = None  # of what it gets; kept by the sender only
    sent: int = 0  # the last version
    acked: int = 0  # the last one that it has acknowledged
    answered: int = 0  # the last one that it has acknowledged or reported as failed
    unreported: str = ""  # why it died before it answered, until that is raised: another may have replaced it
    pid: int = 0
    connection: Connection | None = None
    unread: dict[int, Section] = field(default_factory=dict)  # by version: where those are that it has not answered
    waiting: Section | None = None  # where the newest is that it gets when it, or its relay, connects or answers

    @property
    def gone(self) -> bool:
        """True if it is not sent to."""
        return self.state in (State.LEFT, State.DEAD)

    def owes(self, version: int) -> bool:
        """True while it may still answer to this version, or a newer one."""
        return self.answered < version and not self.gone

    def apply(self, report: Report) -> None:
        """The only place where the state and the versions that it has answered change."""
        event, _, version, text = report
        if (state := event.value[1]) is not None:
            self.state, self.reason = state, text or state.value
        if event is Event.CONNECTED:
            self.answered = self.sent  # another process: it owes no answer
        elif event is Event.STARTED:
            self.acked = self.answered = 0
        elif event is Event.ACK:
            self.acked = max(version, self.acked)
            self.answered = max(version, self.answered)
        elif event is Event.ERROR:
            self.answered = max(version or self.sent, self.answered)
        elif event is Event.DIED and self.answered < self.sent:
            self.unreported = text
