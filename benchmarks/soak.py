"""What the soak programs share: cases that are counted and can be continued, and jobs that must leave nothing behind.

A soak program runs random cases, each made from its own number, until it has done `--repeats` of them. It notes each in
<results>/<program>.state, continues from there when it is started again, and writes <results>/<program>.json whenever
it ends (SIGTERM and Ctrl-C too). A case that fails is printed with the command that repeats it.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import record
from mpi_util.host import reap

TOKEN = "SOAK_TOKEN"  # in the environment of all processes of a case
_LEAVE_S = 10.0  # within which a job that has ended must be gone
_MOST_SECONDS = 2000  # samples that are kept of each group


class CaseError(Exception):
    """What a case has found."""


@dataclass
class Box:
    """A folder for temporary files, and a mark in the environment, by which one case knows what is its own."""

    folder: Path
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    segments: set[str] = field(default_factory=set)  # MPI's files that its processes have mapped or open

    def environment(self, mpi: str, **more: str) -> dict[str, str]:
        return record.mpi_environment(mpi) | {TOKEN: self.token, "TMPDIR": str(self.folder)} | more

    def start(self, command: Sequence[Any], mpi: str, **more: str) -> subprocess.Popen[str]:
        self.errors = open(self.folder / "stderr", "w+")  # noqa: SIM115
        return subprocess.Popen(
            list(map(str, command)), cwd=record.ROOT, env=self.environment(mpi, **more), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.errors,
        )  # fmt: skip

    def wait(self, process: subprocess.Popen[str], timeout_s: float) -> int:
        """Its status, once nothing of the job is left. CaseError: it does not end, or something is left."""
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise CaseError(f"no end within {timeout_s:.0f} s; {self.said()}") from None
        end = time.monotonic() + _LEAVE_S
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.02)
        if left:
            raise CaseError(f"left behind: {left}; {self.said()}")
        return status

    def run(self, command: Sequence[Any], mpi: str, timeout_s: float, status: int = 0, **more: str) -> None:
        """Runs a job; CaseError unless it ends in time with this status."""
        found = self.wait(self.start(command, mpi, **more), timeout_s)
        if found != status:
            raise CaseError(f"status {found}; {self.said()}")

    def said(self) -> str:
        self.errors.seek(0)
        return "stderr: " + " | ".join(self.errors.read().splitlines()[-8:])

    def pids(self) -> list[int]:
        """Processes of this case."""
        mark, found = f"{TOKEN}={self.token}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        self.segments |= {path for pid in found for path in reap.mpi_files(pid)}
        return sorted(found)

    def left(self) -> list[str]:
        files = [path for path in self.segments if os.path.exists(path)]
        return [f"process {pid}" for pid in self.pids()] + [p.name for p in self.folder.glob("mpi_util-*")] + files


@contextlib.contextmanager
def box() -> Iterator[Box]:
    """A box; what is left in it at the end, after a failure, is killed."""
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        made = Box(Path(folder))
        try:
            yield made
        finally:
            for pid in made.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def command_line(doc: str, repeats: int, **more: Any) -> argparse.ArgumentParser:
    """As `record.command_line`; `--case` repeats one case."""
    parser = record.command_line(doc, repeats, **{"mpi": "mpich,openmpi"} | more)
    parser.add_argument("--case", type=int, help="run only the case with this number, and note nothing")
    return parser


def soak(
    args: argparse.Namespace,
    groups: Sequence[str],
    case: Callable[[str, int], tuple[int, dict[str, float]]],
    claims: Callable[[int, int, dict[str, Any]], list[dict[str, Any]]],
    **more: Any,
) -> None:
    """Runs cases of all groups in turn until `--repeats` are done.

    Args:
        case: (group, number) -> (how many it counts for, measurements, of which the last ones are kept). CaseError: it
            has failed.
        claims: (done, failures, measurements by group) -> claims for the file of results.
        more: as for `record.save`.
    """
    # a background job of a script starts with SIGINT ignored, and so would all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    program = Path(sys.argv[0]).stem
    path = args.results / f"{program}.state"
    fresh = {"done": 0, "next": 0, "seconds": [], "measured": {}}
    state: dict[str, Any] = {"failures": [], "groups": {}}
    if args.case is None and path.exists():
        state = json.loads(path.read_text())
    groups_state = {name: state["groups"].setdefault(name, dict(fresh, seconds=[], measured={})) for name in groups}
    if args.case is not None:
        return print({name: case(name, args.case) for name in groups})
    args.results.mkdir(parents=True, exist_ok=True)
    try:
        while sum(group["done"] for group in groups_state.values()) < args.repeats:
            name, group = min(groups_state.items(), key=lambda item: (item[1]["done"], item[1]["next"]))
            began, number = time.monotonic(), group["next"]
            try:
                counts, measured = case(name, number)
                group["done"] += counts
                group["measured"] |= measured
            except CaseError as error:
                state["failures"].append(f"{name}, case {number}: {error}")
                print(
                    f"FAILED {state['failures'][-1]}; repeat: python -m benchmarks.{program} --case {number}",
                    flush=True,
                )
                if len(state["failures"]) > 20:
                    sys.exit("too many failures")
            group["next"] += 1
            group["seconds"] = [*group["seconds"][-_MOST_SECONDS:], round(time.monotonic() - began, 3)]
            draft = path.with_suffix(".new")
            draft.write_text(json.dumps(state))
            draft.replace(path)
    finally:
        done = sum(group["done"] for group in groups_state.values())
        measured = {name: group["measured"] for name, group in groups_state.items()}
        spreads = {
            n: {"seconds per case": record.spread(g["seconds"])} for n, g in groups_state.items() if g["seconds"]
        }
        counted = {name: group["done"] for name, group in groups_state.items()}
        found = claims(done, len(state["failures"]), measured)
        record.save(args, spreads, found, done=counted, failures=state["failures"], measured=measured, **more)


def count_claims(what: str, goal: int, done: int, failures: int) -> list[dict[str, Any]]:
    """That so many were done, and that none has failed."""
    return [record.claim(what, done, at_least=goal), record.claim(f"{what}: failures", failures, at_most=0)]
