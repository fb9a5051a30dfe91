"""In the sender's process: the record of one worker: its state, what was sent to it, and what it has answered.

    ABSENT --started--> READY --ended--> LEFT or DEAD --connected--> ABSENT

Another process that replaces a worker connects as it. An ABSENT worker whose process or rank has ended becomes DEAD.
"""

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpi_util.arrays.layout import Layout
from mpi_util.errors import WorkerLeftError
from mpi_util.ranks.identity import Role
from mpi_util.ranks.state import state

from .sections import Section


class State(enum.Enum):
    ABSENT = "it has not connected, or there is no update for it yet"
    READY = "it gets updates"
    LEFT = "it has shut down"
    DEAD = "its process ended"


class Failure(NamedTuple):
    """Of a worker. version: that it could not apply; 0: not even the first."""

    worker: int
    version: int
    text: str


def name_of(model_id: str | None) -> str:
    """The model, in messages."""
    return f"the model '{model_id}'" if model_id is not None else "the model"


def left(text: str) -> WorkerLeftError:
    """The error of a side whose other side has ended. In a job the parent of mpi_fork reports that first."""
    error = WorkerLeftError(text)
    error.silent = bool(state(Role).job)
    return error


@dataclass(eq=False)
class Worker:
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

    def connected(self, connection: Any) -> None:
        """A process is this worker from now on. It owes no answer to what was sent before."""
        self.pid, self.connection = connection.pid, connection
        self.state, self.reason, self.answered = State.ABSENT, State.ABSENT.value, self.sent

    def started(self) -> None:
        """The process's first update is sent."""
        self.state, self.reason, self.acked, self.answered = State.READY, State.READY.value, 0, 0

    def acknowledged(self, version: int) -> None:
        """It has applied a version."""
        self.acked, self.answered = max(version, self.acked), max(version, self.answered)

    def ended(self, died: str = "") -> None:
        """It has died (how), or shut down in order."""
        self.state = State.DEAD if died else State.LEFT
        self.reason = died or self.state.value
        if died and self.answered < self.sent:
            self.unreported = died
