"""Starts an agent on each other host, compares what the hosts have, and hears the agents. Runs in the waiting parent.

See agent.py for the messages.
"""

import contextlib
import os
import re
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..errors import HostError, LaunchError
from ..ranks.identity import BEGAN_IN
from . import agent

_HELLO_S = 40.0  # until an agent answers: its interpreter and MPI's library may come from a slow network file system
_LAST_WORDS_S = 2.0
_FLUSH_S = 0.05
_OF_SRUN = re.compile(r"srun:.*\bExited\b")  # comes after the words of what it has started
_OF_HOST = re.compile(r"(HOSTNAME|SSH_.*|DBUS_.*|XDG_.*|DISPLAY|WINDOWID|TERM_.*)$")  # variables of a host or login


class Remote(agent.JsonLines):
    """One host's agent."""

    lost = ""  # why the host cannot be reached
    done = False  # the agent has ended what was there, or the host is lost
    stopped = False  # the lowest rank there
    offset_s = 0.0  # how far its clock is ahead of this one's, by the shortest trip there and back

    def __init__(self, name: str, shell: tuple[str, ...], start: dict[str, Any]):
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = f"exec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(agent.BOOT)}"
        script = ["sh", "-c", command] if shell[0] == "srun" else [command]
        process: Any = subprocess.Popen(  # noqa: S603  # the shell that reaches the host
            [*shell, name, *script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            start_new_session=True,
        )  # fmt: skip
        self._process, self.output = process, process.stdout.fileno()
        os.set_blocking(process.stdin.fileno(), False)
        super().__init__(self.output, process.stdin.fileno())
        self._heard, self._beat = time.monotonic(), 0.0
        self._trip_s = float("inf")
        self.say(**start)

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived; sets `lost` at the end of the connection."""
        try:
            messages = self.read()
        except ValueError:
            return self.lose("something else than mpi_util's agent answers there")
        if messages is None:
            return self.lose(self._last_words() or "its connection was closed")
        self._heard = time.monotonic()
        for message in messages:
            if "beat" in message:
                now, self.stopped = time.time(), message["stopped"]
                if 0 <= now - message["beat"] < self._trip_s:
                    self._trip_s = now - message["beat"]
                    self.offset_s = message["time"] - (message["beat"] + now) / 2
            self.done = self.done or "done" in message
        return messages

    def lose(self, why: str) -> list[dict[str, Any]]:
        """Treats the host as lost, unless it had ended all before."""
        self.lost = self.lost or ("" if self.done else why)
        self.done = True
        return []

    def look(self) -> None:
        """Sends a heartbeat when one is due; treats the host as lost if it has sent none for `SILENCE_S`."""
        now = time.monotonic()
        if now - self._beat > agent.BEAT_S:
            self._beat = now
            self.say(beat=time.time())
        self.flush()
        if now - self._heard > agent.SILENCE_S:
            self.lose(f"nothing comes from it for {now - self._heard:.0f} s: its network is down, or it is")

    def _last_words(self) -> str:
        """What its shell said, and with which status it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        if self._process.returncode == 127:
            return f"it has no {sys.executable}"
        words = [line for line in lines if line and not _OF_SRUN.match(line)]
        return words[-1].removesuffix(".") if words else ""  # more words follow

    def close(self) -> None:
        """Ends the connection; the agent ends then by itself."""
        self._process.kill()
        with self._process:  # waits for it, and closes its pipes
            self._errors.close()


def connect(
    by_host: dict[str, list[int]], shell: tuple[str, ...], job: str, environment: dict[str, str], script: str
) -> tuple[dict[str, Remote], str]:
    """Starts an agent on each host, side by side. Returns those of other hosts, and this host's name among them or "".

    HostError: hosts cannot be used; no agent is left then.

    Args: by_host: the ranks of each. job: the folder to make there. script: the program's file, or "".
    """
    path = [str(Path(agent.__file__).parents[2]), *sys.path]
    kept = {name: value for name, value in environment.items() if not _OF_HOST.match(name)}
    start = dict(cwd=BEGAN_IN, path=path, job=job, script=script, environment=kept)
    own = socket.gethostname()
    here = [name for name in by_host if name in ("localhost", "127.0.0.1", own, own.partition(".")[0])]
    machines = {agent.machine(): name for name in here[:1]}
    wrong = {name: f"it is {here[0]}, by another name" for name in here[1:]}
    remotes, used = dict[str, Remote](), dict[str, Remote]()
    try:
        for name, ranks in by_host.items():
            if name not in here:
                remotes[name] = Remote(name, shell, start | {"ranks": ranks})
        wrong |= _compare(remotes, script, machines)
        if any(wrong.values()):
            raise HostError({name: wrong[name] for name in by_host if wrong.get(name)})
        mine = machines.get(agent.machine(), "")
        used = {name: each for name, each in remotes.items() if name != mine}
        return used, mine
    except OSError as error:
        raise LaunchError(f"other hosts are reached by {shell[0]}, which cannot be started: {error}") from None
    finally:  # also where Ctrl-C comes meanwhile
        for name in remotes.keys() - used.keys():
            remotes[name].close()


def _compare(remotes: dict[str, Remote], script: str, machines: dict[str, str]) -> dict[str, str]:
    """What is wrong with each host, "" if nothing is; notes in `machines` ({machine: host}) what the hosts are."""
    found, own = dict[str, str](), agent.facts(script) if remotes else {}
    deadline = time.monotonic() + _HELLO_S
    for name, each in remotes.items():
        messages, waiting = list[dict[str, Any]](), select.poll()
        waiting.register(each.output, select.POLLIN)
        while not messages and not each.lost:  # nothing has come, or what a login shell prints
            for remote in remotes.values():
                remote.flush()  # a large environment does not fit into a pipe
            if waiting.poll(_FLUSH_S * 1e3):
                messages = each.receive()
            elif time.monotonic() > deadline:
                each.lose(f"it does not answer within {_HELLO_S:g} s")
        found[name] = each.lost or _difference(messages[0]["facts"], own, script)
        if not found[name] and (other := machines.setdefault(messages[0]["machine"], name)) != name:
            found[name] = f"it is {other}, by another name"
    return found


def _difference(there: dict[str, str], here: dict[str, str], script: str) -> str:
    if script and script not in there:
        return f"it has no {script}"
    for name, value in here.items():
        if there.get(name) != value:
            if name == script:
                return f"its {script} has another content than the one here"
            return f"it has {name} {there.get(name) or '(none)'}; here it is {value or '(none)'}"
    return ""
