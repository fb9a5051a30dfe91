"""Find out from the evidence how a job ended: which rank failed first, how, and with which status the parent ends."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .reap import read_record

# What launchers and MPI libraries print about a rank (MPICH 5.0, Open MPI 5.0). Groups: rank, and signal or status.
_REPORTS = (
    re.compile(r"^Abort\((?P<status>-?\d+)\) on node (?P<rank>\d+) ", re.MULTILINE),
    re.compile(r"MPI_ABORT was invoked on rank (?P<rank>\d+)(?:.|\n)*?[Ee]rrorcode:? (?P<status>-?\d+)"),
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+\s+exited on\s+signal (?P<signal>\d+)"),
    re.compile(r"Process name: +\[.*[,.](?P<rank>\d+)\]\s+Exit code: +(?P<status>\d+)"),
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exiting\s+improperly"),
)
_KILLED_CODES = (signal.SIGKILL, 128 + signal.SIGKILL)  # a launcher's, for a rank that was killed
# statuses after which the job is not started again: a usage error, SIGHUP, SIGINT, SIGTERM
_FINAL = (2, 129, 130, 143)
_HELPER = "a helper process of the launcher"
_HYDRA_SIGNAL = re.compile(r"EXIT STRING: .*\(signal (\d+)\)")


@dataclass(frozen=True)
class Verdict:
    """How a job ended."""

    status: int  # for the parent to exit with, 0 to 255; 128 + signal for a signal
    line: str = ""  # for the user; "" if there is nothing to report
    last_words: str = ""  # the launcher's output, where nothing better is known
    cause: str = ""  # of a failure after which another start may help; the same where the failure is the same


@dataclass
class Evidence:
    """What the parent has seen of a job. A negative exit code is a signal."""

    n_ranks: int
    folder: Path  # of the job, with the ranks' records
    # (rank, exit code or None if it was not seen), in the order in which the ranks ended
    deaths: list[tuple[int, int | None]] = field(default_factory=list)
    banners: str = ""  # what the launcher and the MPI library printed about the end
    launcher_code: int = 0
    forwarded: int = 0  # the signal that was passed on to rank 0
    decided: Verdict | None = None  # if the parent itself ended the job
    helper_code: int = 0  # exit code of a helper process of the launcher, if it is known
    given_up: bool = False  # the parent ended the job because the launcher did not
    overlooked: int | None = None  # the rank that had then ended first, with status 0 and no record


@dataclass(frozen=True)
class _Failure:
    """The rank that failed first."""

    rank: int
    code: int  # negative: a signal; 0: an end without MPI_Finalize
    reason: str = ""
    place: str = ""  # in the program, as the rank saw it
    in_order: bool = False  # all ranks have agreed to end with it
    told: bool = False  # the rank has reported it in one line


def judge(evidence: Evidence) -> Verdict:
    """Weighs the evidence of a job that has ended.

    A rank's own record comes first, then the end of the launcher itself, then what launcher and MPI library report
    about a rank, then the order in which the ranks died.
    """
    if evidence.decided:
        return evidence.decided
    failure = _first_failure(evidence)
    code = failure.code if failure else evidence.launcher_code
    if failure is None and code == 0:
        return Verdict(0)
    status = 128 - code if code < 0 else min(code, 255) or 1
    asked = evidence.forwarded and status == 128 + evidence.forwarded
    if asked or (failure and failure.in_order):
        return Verdict(status)  # rank 0, or the program that chose to end, has reported why
    what, place, last_words = _describe(code), "", evidence.banners
    if failure:
        record = read_record(evidence.folder / f"rank-{failure.rank}")
        reason = failure.reason or "above mpi_fork" * (bool(record) and "shm" not in record)
        who, place, last_words = f"rank {failure.rank}", failure.place, ""
        what += f" ({reason})" if reason else ""
    elif evidence.n_ranks == 1:
        who = "the program"  # started without a launcher
    elif evidence.helper_code < 0:
        status, who, what, last_words = 1, _HELPER, _describe(evidence.helper_code), ""
    elif evidence.given_up:
        status, who, what = 1, _HELPER, "died"
    else:
        who = "the launcher" if code < 0 else "the job"
    stopped = f"all {evidence.n_ranks} ranks were stopped" * (evidence.n_ranks > 1)
    parts = ["" if failure and failure.told and stopped else f"{who} {what}", stopped]
    final = evidence.forwarded or status in _FINAL
    cause = "" if final else f"{what} {place}"
    return Verdict(status, f"mpi_util: {'; '.join(filter(None, parts))}", last_words, cause)


def failed_record(folder: Path) -> dict[str, Any] | None:
    """The earliest record of a rank that failed on its own account (failed-<k>), or None."""
    records = [read_record(path) | {"rank": int(path.name[7:])} for path in folder.glob("failed-*[0-9]")]
    return min(records, key=lambda record: record.get("time", float("inf")), default=None)


def describe_signal(signum: int) -> str:
    """A signal's number and name, such as "signal 9 (SIGKILL)"."""
    names = [f" ({known.name})" for known in signal.Signals if known == signum]
    return f"signal {signum}{''.join(names)}"


def _first_failure(evidence: Evidence) -> _Failure | None:
    record = failed_record(evidence.folder)
    if record:
        status, reason = int(record.get("status") or 1), str(record.get("reason", ""))
        place, in_order, told = str(record.get("place", "")), bool(record.get("in_order")), bool(record.get("told"))
        return _Failure(record["rank"], status, reason, place, in_order, told)
    if evidence.helper_code < 0:  # its ranks die with it
        return None
    if evidence.given_up and evidence.overlooked is not None:
        return _Failure(evidence.overlooked, 0)
    if evidence.launcher_code < 0 and not evidence.given_up:
        return None
    for pattern in _REPORTS:
        if match := pattern.search(evidence.banners):
            found = match.groupdict()
            code = -int(found["signal"]) if "signal" in found else int(found.get("status", 0))
            return _Failure(int(found["rank"]), code)
    return _first_death(evidence)


def _first_death(evidence: Evidence) -> _Failure | None:
    """The rank that failed first where the launcher names none (hydra), from how and in which order the ranks died.

    hydra kills the others with SIGKILL, so a rank with another bad end is the one. Without one, it is the first that
    was killed; or, if several were, the one that left before with status 0 and without MPI_Finalize, at which hydra
    kills the others too. It is none of these if hydra's status is another: one has called MPI_Abort, and hydra, which
    kills that rank too, may drop the line that names it.
    """
    codes = dict(evidence.deaths)
    hydra_signal = _HYDRA_SIGNAL.search(evidence.banners)
    first_unknown = next((rank for rank, code in codes.items() if code is None), None)
    if first_unknown is not None and hydra_signal:
        codes[first_unknown] = -int(hydra_signal.group(1))
    killed = [rank for rank, code in codes.items() if code == -signal.SIGKILL]
    for rank, code in codes.items():
        if code not in (None, 0, -signal.SIGKILL):
            return _Failure(rank, code)
    if evidence.launcher_code > 0 and evidence.launcher_code not in _KILLED_CODES:
        return None
    if len(killed) > 1 and codes[first := next(iter(codes))] == 0:
        return _Failure(first, 0)
    return _Failure(killed[0], -signal.SIGKILL) if killed else None


def _describe(code: int) -> str:
    if code < 0:
        return f"was killed by {describe_signal(-code)}"
    return f"ended with status {code}" if code else "ended before MPI_Finalize"
