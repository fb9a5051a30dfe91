"""The parent's side of the agents: starts one on each host, compares what the hosts have, and hears of the ranks there.

See agent.py for what the two write each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from . import agent, hosts

_HELLO_S = 40.0  # until an agent answers: its interpreter and MPI's library may come from a slow network file system
_LAST_WORDS_S = 2.0
_FLUSH_S = 0.05
# variables that belong to one host or login
_OF_HOST = re.compile(r"(HOSTNAME|SSH_.*|DBUS_.*|XDG_.*|DISPLAY|WINDOWID|TERM_.*)$")


class Remote:
    """One host's agent.

    Attributes:
        name: of the host. lost: why it cannot be reached; "": it can. done: it has ended what was there.
    """

    def __init__(self, name: str, shell: tuple[str, ...], start: dict[str, Any]):
        self.name, self.lost, self.done = name, "", False
        self.stopped = False  # its lowest rank
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = f"exec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(agent.BOOT)}"
        script = ["sh", "-c", command] if shell[0] == "srun" else [command]
        process: Any = subprocess.Popen(  # noqa: S603  # the shell that reaches the host
            [*shell, name, *script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            start_new_session=True,
        )  # fmt: skip
        self._process, self._input, self.output = process, process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._input, False)
        self._lines, self._unsent = agent.Lines(self.output), b""
        self._heard = time.monotonic()
        self._beat = 0.0
        self._offset, self._trip_s = 0.0, float("inf")  # of its clock; of the shortest trip there and back
        text = json.dumps(start).encode()
        self._send(b"%12d" % len(text) + text)

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived; sets `lost` at the end of the connection."""
        try:
            messages = self._lines.read()
        except ValueError:
            return self.lose("what arrives from it is not of mpi_util")
        if messages is None:
            return self.lose(self._last_words() or "its connection was closed")
        self._heard = time.monotonic()
        for message in messages:
            if "beat" in message:
                self._clock(message)
            self.done = self.done or "done" in message
        return messages

    def lose(self, why: str) -> list[dict[str, Any]]:
        """It is not there any more."""
        self.lost = self.lost or ("" if self.done else why)
        self.done = True
        return []

    def _clock(self, message: dict[str, Any]) -> None:
        """Learns how far its clock is from this one's, from the shortest trip."""
        now = time.time()
        self.stopped = message["stopped"]
        if 0 <= now - message["beat"] < self._trip_s:
            self._trip_s = now - message["beat"]
            self._offset = message["time"] - (message["beat"] + now) / 2

    def here(self, at: float) -> float:
        """A time of its clock, by this host's clock."""
        return at - self._offset

    def look(self) -> None:
        """Sends a heartbeat when one is due; treats the host as lost if it has sent none for `SILENCE_S`."""
        now = time.monotonic()
        if now - self._beat > agent.BEAT_S:
            self._beat = now
            self.say(beat=time.time())
        self.flush()
        if now - self._heard > agent.SILENCE_S:
            self.lose(f"nothing comes from it for {now - self._heard:.0f} s: its network is down, or it is")

    def say(self, **message: Any) -> None:
        """Writes the agent a message."""
        self._send(json.dumps(message).encode() + b"\n")

    def _send(self, data: bytes) -> None:
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Sends what the pipe had no room for."""
        with contextlib.suppress(OSError):  # it is full, or broken: then nothing comes either
            while self._unsent:
                self._unsent = self._unsent[os.write(self._input, self._unsent[: 1 << 16]) :]

    def answer(self) -> dict[str, Any] | None:
        """Its first message; None: it has not come."""
        messages = self.receive()
        return messages[0] if messages else {"wrong": self.lost} if self.lost else None

    def _last_words(self) -> str:
        """What its shell said, and with which status it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        if self._process.returncode == 127:
            return f"it has no {sys.executable}"
        return lines[-1].strip().removesuffix(".") if lines else ""  # more words follow

    def close(self) -> None:
        """Ends the connection; the agent ends then by itself."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):
                file.close()


def connect(
    names: dict[str, list[int]], shell: tuple[str, ...], job: str, environment: dict[str, str], script: str
) -> tuple[list[Remote], dict[str, str]]:
    """Starts the agents, side by side. Returns them, and {host: what is wrong with it}: "" for this machine.

    Args: names: with their ranks. job: the folder to make there. script: the program's file, or "".
    """
    root = str(Path(agent.__file__).parents[2])
    kept = {name: value for name, value in environment.items() if not _OF_HOST.match(name)}
    start = dict(cwd=os.getcwd(), python=sys.executable, root=root, job=job, script=script, environment=kept)
    here = [name for name in names if hosts.is_here(name)]
    wrong: dict[str, str | None] = {name: f"it is {here[0]}, by another name" for name in here}
    wrong |= dict.fromkeys(here[:1], "")
    remotes: list[Remote] = []
    try:
        for name, ranks in names.items():
            if name not in wrong:
                remotes.append(Remote(name, shell, start | {"ranks": ranks}))
        wrong |= _compare(remotes, script, here[:1])
    except OSError as error:
        raise LaunchError(f"other hosts are reached by {shell[0]}, which cannot be started: {error}") from None
    finally:  # those that are not used, or all where Ctrl-C comes meanwhile
        used = [remote for remote in remotes if wrong.get(remote.name, True) is None]
        for remote in remotes:
            if remote not in used:
                remote.close()
    return used, {name: what for name, what in wrong.items() if what is not None}


def _compare(remotes: list[Remote], script: str, here: list[str]) -> dict[str, str | None]:
    """What is wrong with each host once it has answered: "" if it is this machine, None if nothing is."""
    if not remotes:
        return {}
    own, found = agent.facts(script), dict[str, str | None]()
    machines = {agent.machine(): "".join(here)}
    deadline = time.monotonic() + _HELLO_S
    with selectors.DefaultSelector() as selector:
        for remote in remotes:
            selector.register(remote.output, selectors.EVENT_READ, remote)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for remote in remotes:
                remote.flush()  # a large environment does not fit into a pipe
            for key, _ in selector.select(min(left, _FLUSH_S)):
                remote = key.data
                if (answer := remote.answer()) is None:
                    continue  # what a login shell prints
                selector.unregister(key.fd)
                other = machines.get(answer.get("machine", ""))
                found[remote.name] = answer.get("wrong") or _difference(answer["facts"], own, script)
                if not found[remote.name]:
                    found[remote.name] = f"it is {other}, by another name" if other else None if other is None else ""
                    machines[answer["machine"]] = remote.name
        for key in list(selector.get_map().values()):
            found[key.data.name] = f"it does not answer within {_HELLO_S:g} s"
    return found


def _difference(there: dict[str, str], here: dict[str, str], script: str) -> str:
    """What is not the same; ""."""
    if script and script not in there:
        return f"it has no {script}"
    for name, value in here.items():
        if there.get(name) != value:
            if name == script:
                return f"its {script} has another content than the one here"
            return f"it has {name} {there.get(name) or '(none)'}; here it is {value or '(none)'}"
    return ""
