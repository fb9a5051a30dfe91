"""Finds out how a job ended: which rank failed first, how, and with which status the parent ends.

Runs in the waiting parent, once per job, on what it has seen (`Evidence`); pure functions, but for the ranks' records.
"""

import math
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..host.reap import read_record
from ..ranks.records import Failure

# What launchers and MPI libraries print about a rank (MPICH 5.0, Open MPI 5.0). An error within MPI is reported by its
# text: its status is the low byte of one of MPI's error codes, which may be 143, as after SIGTERM.
_REPORTS = (
    re.compile(r"^Abort\(-?\d+\)(?: on node (?P<rank>\d+) .*)?: (?P<error>Fatal error in .+?)(, error stack:)?$", re.M),
    re.compile(r"^\0?\*\*\* (?P<error>An error occurred in MPI_\w+)$", re.M),
    re.compile(r"^Abort\((?P<status>-?\d+)\) on node (?P<rank>\d+) ", re.M),
    re.compile(r"MPI_ABORT was invoked on rank (?P<rank>\d+)(?:.|\n)*?[Ee]rrorcode:? (?P<status>-?\d+)"),
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+\s+exited on\s+signal (?P<signal>\d+)"),
    re.compile(r"Process name: +\[.*[,.](?P<rank>\d+)\]\s+Exit code: +(?P<status>\d+)"),
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exiting\s+improperly"),
)
_HYDRA_SIGNAL = re.compile(r"EXIT STRING: .*\(signal (\d+)\)")
# a launcher's, for a rank that was killed; SIGPIPE: hydra has written to a process of its own that had ended by then
_KILLED_CODES = (0, signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGPIPE)
# Open MPI's ranks print this, and end with this status (MPI_ERR_UNKNOWN), when a rank on another host has gone
_CUT_OFF, _CUT_OFF_CODE = "*** An error occurred in Socket closed", 14
# statuses after which the job is not started again: a usage error, SIGHUP, SIGINT, SIGTERM
_FINAL = (2, 129, 130, 143)
_HELPER = "a helper process of the launcher"


class Death(NamedTuple):
    """The end of a rank, or of a helper process of the launcher, with which its ranks end too."""

    rank: int  # -1: a helper process
    code: int | None  # exit code, negative for a signal; None: it was not seen
    certain: bool  # False: only the rank's FIFO has closed, which comes first and shows the order
    time: float  # of time.time()
    host: str = ""  # where, if it was on another machine


_NO_DEATH = Death(-1, None, False, math.inf)


class Verdict(NamedTuple):
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
    deaths: dict[int, int | None] = field(default_factory=dict)  # exit code of each rank that has ended; None: unseen
    times: dict[int, float] = field(default_factory=dict)  # when each of these did
    hosts: Mapping[int, str] = field(default_factory=dict)  # of each rank; {}: all are on this machine
    lost: Mapping[str, str] = field(default_factory=dict)  # hosts that cannot be reached any more, and why
    banners: str = ""  # what the launcher and the MPI library printed about the end
    launcher_code: int = 0  # 0 also if the parent ended it
    forwarded: int = 0  # the signal that was passed on to rank 0
    helper: Death = _NO_DEATH  # the first of the launcher's helper processes that died
    given_up: bool = False  # the parent ended the job because the launcher did not

    def died(self, death: Death) -> None:
        """A rank has ended; what is known of that first is its time, and then its exit code."""
        self.times.setdefault(death.rank, death.time)
        if death.code is not None or death.rank not in self.deaths:
            self.deaths[death.rank] = death.code

    def ended_in_order(self, rank: int) -> bool:
        """True for a rank that has ended with status 0 and MPI_Finalize; where the job's folder has gone, with 0."""
        noted = (self.folder / f"ended-{rank}").exists() or not self.folder.exists()
        return rank in self.deaths and not self.deaths[rank] and noted

    def stopped_by(self, signum: int) -> Verdict:
        """Of a job that the parent ends because of a signal."""
        return Verdict(128 + signum, _line(describe_signal(signum), self.n_ranks))


def judge(evidence: Evidence) -> Verdict:
    evidence.deaths = dict(sorted(evidence.deaths.items(), key=lambda item: evidence.times.get(item[0], 0)))
    if evidence.lost:
        text = "; ".join(f"host {name} is lost: {why}" for name, why in evidence.lost.items())
        return Verdict(1, _line(text, evidence.n_ranks), cause=f"lost {sorted(evidence.lost)}")
    failure = _first_failure(evidence)
    if failure is None:
        return Verdict(0)
    code, of_rank = failure.status, failure.who.startswith("rank")
    status = 1 if failure.who == _HELPER else 128 - code if code < 0 else min(code, 255) or 1
    if evidence.forwarded and code == -evidence.forwarded:
        return evidence.stopped_by(evidence.forwarded)
    if failure.in_order or (evidence.forwarded and code == 128 + evidence.forwarded):
        return Verdict(status)  # rank 0, or the program that chose to end, has reported why
    record = read_record(evidence.folder / failure.who.replace(" ", "-")) if of_rank else {}
    notes = [failure.reason] if failure.reason else ["above mpi_fork"] * (bool(record) and "shm" not in record)
    notes += ["the usual cause is a full /dev/shm: docker run --shm-size=1g"] * (code == -signal.SIGBUS)
    what = _describe(code) + (f" ({'; '.join(notes)})" if notes else "")
    who = failure.who
    if of_rank and (host := evidence.hosts.get(int(who.removeprefix("rank ")))):
        who += f"@{host}"
    elif who == _HELPER and evidence.helper.host:
        who += f" on {evidence.helper.host}"
    known = f"{who} {what}"
    if failure.reported and evidence.n_ranks > 1:  # by `fail` its line, which need not say who it is; else with a tag
        known = "" if failure.place else f"{who} has ended the job"
    cause = "" if evidence.forwarded or status in _FINAL else f"{_describe(code)} {failure.place or failure.reason}"
    last_words = evidence.banners if failure.who == "the job" else ""
    return Verdict(status, _line(known, evidence.n_ranks), last_words, cause)


def failed_record(folder: Path) -> Failure | None:
    """The earliest record of a rank that failed on its own account (failed-<k>), or None."""
    found = [(read_record(path), f"rank {path.name[7:]}") for path in folder.glob("failed-*[0-9]")]
    records = [Failure(**record)._replace(who=who) for record, who in found]
    return min(records, key=lambda record: record.time, default=None)


def describe_signal(signum: int) -> str:
    names = [f" ({known.name})" for known in signal.Signals if known == signum]
    return f"signal {signum}{''.join(names)}"


def _first_failure(evidence: Evidence) -> Failure | None:
    """Who failed first, by the best evidence there is.

    A rank that has recorded it; else a part of the launcher that was killed, as its ranks die with it; else the rank
    that the launcher names; else what the order of the deaths says.
    """
    if recorded := failed_record(evidence.folder):
        return recorded
    if (signum := evidence.forwarded) and evidence.deaths.get(0) == -signum:  # others may crash as it goes (MPICH)
        in_order = 128 + signum in evidence.deaths.values()  # then Open MPI, once one had ended so, killed the others
        return Failure(128 + signum if in_order else -signum, who="rank 0")
    if (code := evidence.helper.code or 0) < 0:
        return Failure(code, who=_HELPER)
    killed = evidence.launcher_code < 0 and evidence.launcher_code not in _KILLED_CODES
    if killed or evidence.n_ranks == 1:  # one is started without a launcher
        who = "the launcher" if evidence.n_ranks > 1 else "the program"
        return Failure(evidence.launcher_code, who=who) if evidence.launcher_code else None
    for pattern in _REPORTS:
        if match := pattern.search(evidence.banners):
            found = match.groupdict()
            code = -int(found["signal"]) if "signal" in found else int(found.get("status", "error" in found))
            rank = found.get("rank") or next(iter(evidence.deaths), None)
            return Failure(code, found.get("error", ""), who="the job" if rank is None else f"rank {rank}")
    return _first_death(evidence)


def _first_death(evidence: Evidence) -> Failure | None:
    """The rank that died first where the launcher names none (hydra).

    hydra sends SIGKILL to the survivors, so a rank that ended otherwise (without MPI_Finalize counts too) is the cause;
    else the first one killed. But if hydra's own status is not that of a kill, a rank has called MPI_Abort: hydra kills
    that rank as well, and may drop the line that names it, so no rank is named. Open MPI sends SIGTERM to the
    survivors, and names no rank as long as a process that a rank has started holds its output open. A launcher that
    gets SIGTERM sends it to all ranks, and names none.
    """
    unseen = -int(hydra[1]) if (hydra := _HYDRA_SIGNAL.search(evidence.banners)) else None
    deaths = {rank: code for rank, code in evidence.deaths.items() if not evidence.ended_in_order(rank)}
    codes = {rank: unseen if code is None else code for rank, code in deaths.items()}
    above_fork = [k for k in codes if (noted := read_record(evidence.folder / f"rank-{k}")) and "shm" not in noted]
    if not (evidence.launcher_code or evidence.given_up or above_fork or any(codes.values())):
        return None
    seen = [code for code in evidence.deaths.values() if code is not None]
    all_seen = len(seen) == evidence.n_ranks or evidence.launcher_code == 1  # Open MPI's, which ends before its ranks
    if set(seen) == {-signal.SIGTERM} and all_seen and not evidence.given_up:
        return Failure(-signal.SIGTERM, who="the launcher (or each rank)")
    several = bool(evidence.hosts)
    by_launcher = (-signal.SIGKILL, *[-signal.SIGTERM] * (several or evidence.given_up))
    cut_off = _CUT_OFF_CODE if _CUT_OFF in evidence.banners else None
    own = [rank for rank, code in codes.items() if code not in (None, cut_off, *by_launcher)]
    killed = [rank for rank, code in codes.items() if code in by_launcher]
    on_hosts = (255, signal.SIGTERM, 128 + signal.SIGTERM, _CUT_OFF_CODE)  # 255: hydra's, for a rank on another host
    codes_of_killed = (*_KILLED_CODES, *on_hosts * several)
    for rank in own or (killed if evidence.launcher_code in codes_of_killed else []) or above_fork:
        return Failure(code if (code := codes[rank]) is not None else evidence.launcher_code, who=f"rank {rank}")
    return Failure(0, who=_HELPER) if evidence.given_up else Failure(evidence.launcher_code, who="the job")


def _describe(code: int) -> str:
    by_itself = f"ended with status {code}" if code else "ended before MPI_Finalize"
    return f"was killed by {describe_signal(-code)}" if code < 0 else by_itself


def _line(what: str, n_ranks: int) -> str:
    stopped = f"all {n_ranks} ranks were stopped" if n_ranks > 1 else ""
    return f"mpi_util: {'; '.join(filter(None, (what, stopped)))}"
