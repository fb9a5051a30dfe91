"""The agent: a process of its own on each other host. It watches the ranks there, and ends them if the parent is lost.

mpi_fork's parent starts it over ssh or srun (monitor.py); it starts the launcher's process there, which starts the
ranks. A side that receives nothing for `SILENCE_S` treats the other as lost, and ends its part of the job.
"""

import contextlib
import functools
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..launch import launcher
from ..launch.monitor import FOLDER_VARIABLES, ProcessMonitor
from ..launch.verdict import Death
from .loaded import digest

BEAT_S, SILENCE_S = 1.0, 8.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RECORDS = ("rank-", "failed-", "ended-", "saved-")
_PACKAGE = Path(__file__).parent.parent

# Runs on the host before anything is known of it, as `python -c`: reads the first message, goes to the program's
# folder, and becomes the agent, which needs only the standard library. The last line on stderr says what is wrong.
BOOT = """
import json, os, sys
line = b""
while not line.endswith(b"\\n"):  # no more than that: the rest is for the agent
    line += os.read(0, 1) or sys.exit(1)
start = json.loads(line)
try:
    os.chdir(start["cwd"])
except OSError:
    sys.exit("it has no folder " + start["cwd"])
os.environ.clear()
os.environ.update(start["environment"])
sys.path[:] = start["path"]
from mpi_util.cluster import agent
agent.main(start["job"], start["ranks"], start["script"])
"""


def facts(script: str) -> dict[str, str]:
    """What must be the same on all hosts, by the names that a message gives it. `script`: its file; "": none."""
    sources = b"".join(path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py")))
    found = {"Python": platform.python_version(), "mpi_util": digest(sources)}
    found["MPI"] = " ".join(launcher.ask_library()[0].replace("Version:", "").splitlines()[0].partition(",")[0].split())
    if script:
        with contextlib.suppress(OSError):
            found[script] = digest(Path(script).read_bytes())
    return found


def machine() -> str:
    """The same text in two processes that see each other's processes and files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt"))])


class Agent:
    """The process on the host, until its end. Args: ranks: that will be here. parent: that started it."""

    def __init__(self, folder: Path, ranks: list[int], parent: "JsonLines"):
        self._folder = folder
        self._monitor = ProcessMonitor(folder, ranks, self._died)
        self._parent = parent
        self._heard = time.monotonic()
        self._written: dict[str, float] = {}  # records that were sent, with their times of change
        self.ended = False

    def run(self, messages: list[dict[str, Any]]) -> None:
        """Until the parent says that the job is over, or is silent for too long. Args: messages: that have come."""
        self._monitor.selector.register(0, selectors.EVENT_READ, lambda: self._receive(self._parent.read()))
        try:
            self._receive(messages)
            while not self.ended and time.monotonic() - self._heard < SILENCE_S:
                self._monitor.step()
                self._send_records()
            self._monitor.kill()
            self._send_records()
        finally:
            self._monitor.close()
        self._parent.say(done=True)

    def _receive(self, messages: list[dict[str, Any]] | None) -> None:
        self.ended = self.ended or messages is None
        for message in messages or ():
            self._heard = time.monotonic()
            if "beat" in message:
                self._parent.say(beat=message["beat"], time=time.time())
            elif "start" in message:
                self._start(message["start"], message["command"])
            elif "signal" in message:
                self._monitor.signal(message["rank"], message["signal"])
                if self._monitor.refused:
                    self._parent.say(unready=self._monitor.refused)
            else:
                self.ended = True

    def _start(self, number: int, command: str) -> None:
        process: Any = subprocess.Popen(  # noqa: S602  # as sshd would have it
            command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | dict.fromkeys(FOLDER_VARIABLES, str(self._folder)), start_new_session=True,
        )  # fmt: skip
        pass_on = functools.partial(self._pass_on, number, process.stdout.fileno())
        self._monitor.selector.register(process.stdout.fileno(), selectors.EVENT_READ, pass_on)
        self._monitor.watch(process.pid, lambda _: self._parent.say(process=number, status=process.wait()))

    def _pass_on(self, number: int, output: int) -> None:
        if text := os.read(output, 1 << 16).decode(errors="replace"):
            self._parent.say(process=number, said=text)
        else:
            self._monitor.selector.unregister(output)

    def _died(self, death: Death) -> None:
        self._send_records()  # first, as the parent asks them why
        self._parent.say(died=death)

    def _send_records(self) -> None:
        for entry in os.scandir(self._folder):
            with contextlib.suppress(OSError):  # it has just been replaced
                if entry.name.startswith(_RECORDS) and self._written.get(entry.name) != (at := entry.stat().st_mtime):
                    text = Path(entry.path).read_text()
                    self._written[entry.name] = at
                    self._parent.say(record=entry.name, text=text)


class JsonLines:
    """Exchanges messages, which are lines of JSON, with the other side. Args: the descriptors of two pipes."""

    def __init__(self, reading: int, writing: int):
        self._reading, self._writing, self._rest, self._unsent = reading, writing, b"", b""

    def read(self) -> list[dict[str, Any]] | None:
        """Messages that have arrived whole, without what a login shell prints; None: the other side has ended.

        ValueError: a line is no message.
        """
        if not (data := os.read(self._reading, 1 << 16)):
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [dict(json.loads(line)) for line in lines if line.startswith(b"{")]

    def say(self, **message: Any) -> None:
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what there was no room for; that the other side has ended is found out by `read`."""
        with contextlib.suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._writing, self._unsent[: 1 << 16]) :]


def main(job: str, ranks: list[int], script: str) -> None:
    """The agent's program: says what this host has, and continues if the parent wants it to."""
    for signum in _SIGNALS:
        # they are for the parent, but Slurm sends them to all; unlike SIG_IGN, a function is not inherited
        signal.signal(signum, lambda *_: None)
    parent = JsonLines(0, 1)
    parent.say(facts=facts(script), machine=machine())
    if not (messages := parent.read()):
        return  # the parent has another one that is on this host, or finds something wrong here
    try:
        agent = Agent(Path(job), ranks, parent)
    except OSError as error:
        sys.exit(f"the job's folder cannot be made there: {error}")
    agent.run(messages[1:])
