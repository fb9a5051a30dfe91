"""In the sender's process: the record of one worker. It has a state, what was sent, and what the worker has answered.

The package's docstring draws the states.
"""

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpi_util.arrays.layout import Layout
from mpi_util.errors import WorkerLeftError
from mpi_util.ranks.identity import Role
from mpi_util.ranks.state import process

from .sections import Section


class State(enum.Enum):
    """What a worker is to the sender."""

    ABSENT = "it has not connected, or there is no update for it yet"
    READY = "it gets updates"
    LEFT = "it has shut down"
    DEAD = "its process ended"


class Event(enum.Enum):
    """What changes a worker's record, and the state that follows; None: the state stays."""

    CONNECTED = "a process connects, and is this worker from now on", State.ABSENT
    STARTED = "its first update is sent", State.READY
    ACK = "it has applied a version", None
    ERROR = "it could not apply a version (0: not even the first)", None
    REFUSED = "a process asks to be this worker, and may not", None
    LEFT = "it shuts down in order", State.LEFT
    DIED = "its process has ended", State.DEAD


class Report(NamedTuple):
    """An event. text: why the worker died, was refused, or could not apply a version."""

    event: Event
    worker: int
    version: int = 0
    text: str = ""


def name_of(model_id: str | None) -> str:
    """The model, in messages."""
    return f"the model '{model_id}'" if model_id is not None else "the model"


def left(text: str) -> WorkerLeftError:
    """The error of a side whose other side has ended. In a job the parent of mpi_fork reports that first."""
    error = WorkerLeftError(text)
    error.silent = bool(process.of(Role).job)
    return error


@dataclass(eq=False)
class Worker:
    """One worker."""

    index: int
    state: State = State.ABSENT
    reason: str = ""  # why it is in this state
    layout: Layout | None = None  # of what it gets
    sent: int = 0  # the last version
    acked: int = 0  # the last version that it has acknowledged
    answered: int = 0  # the last version that it has acknowledged or reported as failed
    unreported: str = ""  # why it died before it answered, until that is raised: another may have replaced it
    pid: int = 0
    connection: Any = None  # a Connection, or a WorkerLink to another machine; None: not connected
    unread: dict[int, Section] = field(default_factory=dict)  # version that it has not answered -> where that is
    waiting: Section | None = None  # what it gets when it connects, or when it answers

    @property
    def gone(self) -> bool:
        """True if nothing is sent to it."""
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
