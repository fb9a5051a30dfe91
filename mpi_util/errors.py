"""The errors of mpi_util. Each message says what is wrong, where, and how to fix it."""

import contextlib
import itertools
import operator
from collections.abc import Iterable
from typing import Any


class MpiUtilError(Exception):
    """Base of every error that mpi_util raises on purpose.

    Attributes:
        silent: True on a rank that raises what another rank reports, so that one report is enough.
        status: exit status of a program that does not catch it.
    """

    silent = False
    status = 1


class LaunchError(MpiUtilError):
    """The ranks could not be started: no MPI library, or no launcher that belongs to it."""


class HostError(LaunchError):
    """Hosts cannot be used; `hosts` says by its name what is wrong with each, the message in a line for each."""

    status = 2

    def __init__(self, hosts: dict[str, str]):
        super().__init__("\n".join(["these hosts cannot be used:", *(f"  {name}: {hosts[name]}" for name in hosts)]))
        self.hosts = hosts


class RankMismatchError(MpiUtilError):
    """Ranks brought different things to one collective call (keys, dtypes, shapes, models, or another call)."""


def rank_mismatch(what: str, found: Iterable[object], ranks: Iterable[int] | None = None) -> RankMismatchError:
    """The error that says `what` differs, in which call, and what to do; with a table of what each of `ranks` has."""
    table = "".join(f"\n  rank {k}: {one}" for k, one in zip(ranks or itertools.count(), found))
    return RankMismatchError(f"{what}:{table}")


def whole_number(what: str, value: Any, least: int = 0) -> int:
    """`value` as an int. UsageError: it is none, as True and 2.0 are none, or less than `least`."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and (number := operator.index(value)) >= least:
            return number
    raise UsageError(f"{what} is a whole number of at least {least}; got {value!r}")


def first_line(error: BaseException) -> str:
    """Of another package's message, which may go on with advice about that package."""
    return str(error).partition("\n")[0]


class RankLeftError(MpiUtilError):
    """A rank ended, or left the program's common path, while others wait for it in a collective call."""


class BatchError(MpiUtilError):
    """A batch holds something that cannot be gathered, such as an object array."""


class WeightsError(MpiUtilError):
    """A model holds nothing that mpi_util can read or write, or weights that cannot be written in place."""


class MissingFrameworkError(MpiUtilError, AttributeError):  # so that hasattr(mpi_util, "tf_config") is False then
    """A function needs a framework that is not installed; the message says what to install."""

    status = 2


class UsageError(MpiUtilError, RuntimeError, TypeError, ValueError):  # other libraries do not agree on which
    """A call that makes no sense as it stands, such as a key logged twice in a row, or an empty grid of experiments."""

    status = 2


class WorkerError(MpiUtilError):
    """A receiver of weights failed; on the sender's side. `worker` is its index, `traceback` its traceback as text."""

    worker = -1
    traceback = ""


class WorkerLeftError(MpiUtilError):
    """The other side of a weight synchronisation has ended: a worker for the sender, the sender for a worker."""


class SimulatorError(MpiUtilError):
    """A simulator failed, has ended, or was not done in time. The message has its worker, and what it said last."""


class SyncTimeoutError(MpiUtilError, TimeoutError):
    """A weight synchronisation was not done in the time that it was given; the message names who has not answered."""
