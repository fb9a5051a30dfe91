"""The processes of a job on several hosts, as launch/supervise.py sees them. Runs in the waiting parent.

This machine's ranks are watched as without other hosts. Those of each other host are watched by an agent there; what it
reports is handled as what happens here, and the records of its ranks are copied into the job's folder.
"""

import contextlib
import functools
import json
import os
import selectors
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..launch.monitor import FOLDER_VARIABLES, ProcessMonitor
from ..launch.verdict import Death
from ..ranks.failure import print_line
from . import remote, rsh

_END_S = 9.0  # for the agents to end what is on their hosts; longer than it takes to know that one is lost
_HYDRA = "-hosts {hosts} -launcher ssh -launcher-exec {rsh}"
_OPTIONS = {  # of each kind of launcher: start the ranks on {hosts}, by the program {rsh} in place of ssh
    "Intel MPI": _HYDRA,
    "MPICH": _HYDRA,
    "Open MPI 5": "--host {hosts} --prtemca plm ssh --prtemca plm_ssh_agent {rsh} --prtemca plm_ssh_no_tree_spawn 1 "
    "--leave-session-attached",
    "Open MPI 4": "--map-by slot --host {hosts} --mca plm rsh --mca plm_rsh_agent {rsh} --mca plm_rsh_no_tree_spawn 1 "
    "--leave-session-attached",
}


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
        self._remotes, here = remote.connect(by_host, shell, str(folder), self._environment, script)
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

    def is_stopped(self, rank: int) -> bool:
        """See ProcessMonitor; on other hosts of their lowest rank only."""
        each = self._remotes.get(self.hosts.get(rank, ""))
        return each.stopped if each else super().is_stopped(rank)

    def pause(self) -> None:
        """See ProcessMonitor: the agents would take this host for lost."""
        if not self._remotes:
            return super().pause()
        print_line("mpi_util: a job on several hosts cannot pause; Ctrl-C ends it")

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

    def _hear(self, each: remote.Remote) -> None:
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
            with contextlib.suppress(KeyError):
                self.selector.unregister(each.output)
