"""Starts an agent on each other host, compares what the hosts have, and hears the agents. Runs in the waiting parent.

See agent.py for the messages.
"""

import contextlib
import json
import os
import re
import selectors
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..errors import HostError, LaunchError
from . import agent

_HELLO_S = 40.0  # until an agent answers: its interpreter and MPI's library may come from a slow network file system
_LAST_WORDS_S = 2.0
_FLUSH_S = 0.05
_OF_HOST = re.compile(r"(HOSTNAME|SSH_.*|DBUS_.*|XDG_.*|DISPLAY|WINDOWID|TERM_.*)$")  # variables of a host or login


class Remote:
    """One host's agent.

    Attributes:
        lost: why the host cannot be reached; "": it can. stopped: the lowest rank there is stopped.
        done: the agent has ended what was there, or the host is lost.
        offset_s: how far its clock is ahead of this one's, by the shortest trip there and back.
    """

    def __init__(self, name: str, shell: tuple[str, ...], start: dict[str, Any]):
        self.name, self.lost, self.done, self.stopped = name, "", False, False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = f"exec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(agent.BOOT)}"
        script = ["sh", "-c", command] if shell[0] == "srun" else [command]
        process: Any = subprocess.Popen(  # noqa: S603  # the shell that reaches the host
            [*shell, name, *script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            start_new_session=True,
        )  # fmt: skip
        self._process, self._input, self.output = process, process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._input, False)
        self._lines, self._unsent = agent.JsonLineReader(self.output), b""
        self._heard, self._beat = time.monotonic(), 0.0
        self.offset_s = 0.0
        self._trip_s = float("inf")
        self.say(**start)

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived; sets `lost` at the end of the connection."""
        try:
            messages = self._lines.read()
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

    def say(self, **message: Any) -> None:
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(OSError):  # full; or broken, which `receive` finds out
            while self._unsent:
                self._unsent = self._unsent[os.write(self._input, self._unsent[: 1 << 16]) :]

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
    by_host: dict[str, list[int]], shell: tuple[str, ...], job: str, environment: dict[str, str], script: str
) -> tuple[dict[str, Remote], str]:
    """Starts an agent on each host, side by side. Returns those of other hosts, and this host's name among them or "".

    HostError: hosts cannot be used; no agent is left then.

    Args: by_host: the ranks of each. job: the folder to make there. script: the program's file, or "".
    """
    root = str(Path(agent.__file__).parents[2])
    kept = {name: value for name, value in environment.items() if not _OF_HOST.match(name)}
    start = dict(cwd=os.getcwd(), python=sys.executable, root=root, job=job, script=script, environment=kept)
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
    found = {name: f"it does not answer within {_HELLO_S:g} s" for name in remotes}
    own, deadline = agent.facts(script) if remotes else {}, time.monotonic() + _HELLO_S
    with selectors.DefaultSelector() as selector:
        for remote in remotes.values():
            selector.register(remote.output, selectors.EVENT_READ, remote)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for remote in remotes.values():
                remote.flush()  # a large environment does not fit into a pipe
            for key, _ in selector.select(min(left, _FLUSH_S)):
                name, messages = key.data.name, key.data.receive()
                if not messages and not key.data.lost:
                    continue  # what a login shell prints
                selector.unregister(key.fd)
                answer = messages[0] if messages else {"wrong": key.data.lost}
                found[name] = answer.get("wrong") or _difference(answer["facts"], own, script)
                if not found[name] and (other := machines.setdefault(answer["machine"], name)) != name:
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
