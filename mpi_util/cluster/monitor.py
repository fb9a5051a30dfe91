"""The processes of a job on several hosts, as launch/supervise.py sees them. Runs in the waiting parent.

An agent (agent.py) watches the ranks of each other host; what it reports is handled as what happens here, and the
records of its ranks are copied into the job's folder.
"""

import contextlib
import functools
import json
import os
import re
import select
import selectors
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import HostError, LaunchError
from ..launch.monitor import FOLDER_VARIABLES, ProcessMonitor
from ..launch.verdict import Death
from ..ranks.identity import BEGAN_IN
from . import agent, rsh

_END_S = 9.0  # for the agents to end what is on their hosts; longer than it takes to know that one is lost
_HELLO_S = 40.0  # until an agent answers: its interpreter and MPI's library may come from a slow network file system
_LAST_WORDS_S = 2.0
_FLUSH_S = 0.05
_OF_SRUN = re.compile(r"srun:.*\bExited\b")  # comes after the words of what it has started
_OF_HOST = re.compile(r"(HOSTNAME|SSH_.*|DBUS_.*|XDG_.*|DISPLAY|WINDOWID|TERM_.*)$")  # variables of a host or login
_HYDRA = "-hosts {hosts} -launcher ssh -launcher-exec {rsh}"
_OPTIONS = {  # of each kind of launcher: start the ranks on {hosts}, by the program {rsh} in place of ssh
    "Intel MPI": _HYDRA,
    "MPICH": _HYDRA,
    "Open MPI 5": "--host {hosts} --prtemca plm ssh --prtemca plm_ssh_agent {rsh} --prtemca plm_ssh_no_tree_spawn 1 "
    "--leave-session-attached",
    "Open MPI 4": "--map-by slot --host {hosts} --mca plm rsh --mca plm_rsh_agent {rsh} --mca plm_rsh_no_tree_spawn 1 "
    "--leave-session-attached",
}


class Remote(agent.JsonLines):
    """One host's agent."""

    lost = ""  # why the host cannot be reached
    done = False  # the agent has ended what was there, or the host is lost
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
                now = time.time()
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


def _connect(
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
        found[name] = each.lost or _difference(messages[0]["facts"], own)
        if not found[name] and (other := machines.setdefault(messages[0]["machine"], name)) != name:
            found[name] = f"it is {other}, by another name"
    return found


def _difference(there: dict[str, str], here: dict[str, str]) -> str:
    for name, value in here.items():
        if there.get(name) != value:
            return f"it has {name} {there[name]}; here it is {value}" if name in there else f"it has no {name}"
    return ""


class ClusterMonitor(ProcessMonitor):
    """The processes of a job on several hosts. HostError: hosts cannot be used; nothing has been started.

    Args: folder, on_death: as for ProcessMonitor. by_host: the ranks of each host. shell: what runs a command there.
        environment: of launcher and ranks. script: the program's file, which all hosts need.
    """

    def __init__(
        self, folder: Path, by_host: dict[str, list[int]], on_death: Callable[[Death], object], shell: tuple[str, ...],
        environment: dict[str, str], script: str,
    ):  # fmt: skip
        self._environment = environment | dict.fromkeys(FOLDER_VARIABLES, str(folder))
        self._rsh = f"{folder}/rsh.sh"
        self._asking: list[socket.socket] = []  # for a process on another host
        self._listener = socket.socket(socket.AF_UNIX)
        self._remotes, here = _connect(by_host, shell, str(folder), self._environment, script)
        try:
            super().__init__(folder, by_host.get(here, []), on_death)
            own = socket.gethostname() if here in ("localhost", "127.0.0.1") else here  # by that others know it
            named = {own if name == here else name: its for name, its in by_host.items()}
            self._slots = {name: len(its) for name, its in named.items() if self._remotes}
            self.hosts = {rank: name for name in self._slots for rank in named[name]}
            self._listen()
        except BaseException:
            self._close_connections()
            raise

    def options(self, family: str) -> list[str]:
        hosts = ",".join(f"{name}:{n}" for name, n in self._slots.items())
        return _OPTIONS[family].format(hosts=hosts, rsh=self._rsh).split() if hosts else []

    def step(self, wait: bool = True) -> None:
        """See ProcessMonitor; hosts from which nothing comes any more are `lost` then."""
        super().step(wait)
        for name, each in self._remotes.items():
            if not each.done:
                each.look()
            if each.lost:
                self.lost.setdefault(name, each.lost)

    def signal(self, rank: int, signum: int) -> None:
        """See ProcessMonitor; a rank on another host that is not ready is known only when its agent has answered."""
        if each := self._remotes.get(self.hosts.get(rank, "")):
            each.say(signal=signum, rank=rank)
        else:
            super().signal(rank, signum)

    def kill(self) -> None:
        """Ends what is left of the job, on other hosts by their agents; what has happened until then is reported."""
        super().kill()
        for each in self._remotes.values():
            each.say(end=True)
        deadline = time.monotonic() + _END_S
        while not all(each.done for each in self._remotes.values()) and time.monotonic() < deadline:
            self.step()

    def close(self) -> None:
        self._close_connections()
        super().close()

    def _close_connections(self) -> None:
        """Without them the agents end by themselves, and so do the launcher's processes that wait for an answer."""
        connections: list[Any] = [self._listener, *self._asking, *self._remotes.values()]
        for each in connections:
            each.close()

    def _listen(self) -> None:
        """From here on agents are heard, and start what the launcher asks for by rsh.py."""
        if not self._remotes:
            return
        path, command = Path(self._rsh), shlex.join([sys.executable, "-I", "-S", rsh.__file__, str(self.folder)])
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o700)
        if not os.access(path, os.X_OK):
            raise LaunchError(f"no program can be run in {path.parent.parent}; set TMPDIR to a folder where one can")
        folder = os.open(self.folder, os.O_PATH)
        self._listener.bind(f"/proc/self/fd/{folder}/rsh")  # the path of a socket has to be short
        os.close(folder)
        self._listener.listen(len(self._remotes))
        self.selector.register(self._listener, selectors.EVENT_READ, self._ask)
        for each in self._remotes.values():
            each.say(go=True)
            self.selector.register(each.output, selectors.EVENT_READ, functools.partial(self._hear, each))

    def _ask(self) -> None:
        connection, _ = self._listener.accept()
        with connection.makefile() as file:  # it writes at once
            arguments = json.loads(file.readline())
        at = next((k for k, argument in enumerate(arguments) if argument in self._slots), None)
        if at is None:
            return connection.close()
        number = len(self._asking)
        self._asking.append(connection)
        # Open MPI tells its process there of the program in place of ssh, which is only here
        command = " ".join(arguments[at + 1 :]).replace(self._rsh, "ssh")
        if arguments[at] in self._remotes:
            return self._remotes[arguments[at]].say(start=number, command=command)
        process = subprocess.Popen(  # noqa: S602  # the launcher does not know that it is here
            command, shell=True, stdin=subprocess.DEVNULL, env=self._environment, start_new_session=True
        )
        self.watch(process.pid, lambda _: self._answer({"process": number, "status": process.wait()}))

    def _answer(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._asking[message["process"]].sendall(json.dumps(message).encode() + b"\n")

    def _hear(self, each: Remote) -> None:
        for message in each.receive():
            if "process" in message:
                self._answer(message)
            elif "record" in message:
                text = message["text"]
                if message["record"].startswith("failed"):
                    record = json.loads(text)
                    text = json.dumps(record | {"time": record["time"] - each.offset_s})
                (self.folder / os.path.basename(message["record"])).write_text(text)
            elif "died" in message:
                death = Death(*message["died"])
                self._on_death(death._replace(time=death.time - each.offset_s, host=each.name))
            elif "unready" in message:
                self.refused = message["unready"]
        if each.done:
            self.selector.unregister(each.output)
