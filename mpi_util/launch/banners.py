"""Passes on what the ranks print, without the launchers' own banners. Runs in threads of the waiting parent.

A failed job ends with one line that names the rank; what mpiexec prints is shown only when nothing better is known.
"""

import math
import os
import re
import select
import threading
import time
from typing import IO

# Open MPI draws lines of exactly 74 dashes (4.x: 55 too), as users may; so the next line must name the launcher.
_DASHES = rb"(?<!-)(?P<dashes>-{74}|-{55})\n.*"
_NAMES_OPEN_MPI = (
    rb"(?:\b(?:prterun|mpirun|mpiexec|orterun|MPI_ABORT|PRTE)\b|"
    rb"^Primary job  terminated|^An MPI communication peer process has unexpectedly disconnected).*\n"
)
_EQUALS = rb"\n?={60,}\n"  # hydra writes its block line by line, after an empty line
_HYDRA_HEAD = b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
_BEGIN = rb"(?:^|(?<=\n\0))\0*"  # Open MPI may send the end of a string before a line
_LINES = {  # how a line of a banner begins, and what must follow
    b"YOUR APPLICATION TERMINATED": rb" WITH THE EXIT STRING: ",
    b"This typically refers to a problem with your application": rb"\.",
    b"Please see the FAQ page": rb" for debugging suggestions",
    b"[mpiexec@": b"",
    b"[proxy:": b"",
    b"Abort(": rb"-?\d+\)(?: on node \d+ .*)?: (?:application called MPI_Abort\(|Fatal error in )",
    b"application called MPI_Abort(": b"",
    b"*** An error occurred in MPI_": b"",
    # Open MPI's ranks on other hosts, when one has gone; its launcher, which writes to a rank that has just ended
    b"[": rb"[\w.-]+:\d+\] (?:\*\*\* (?:An error occurred in Socket closed|reported by process|on a NULL communicator|"
    rb"Unknown error|MPI_ERRORS_ARE_FATAL|   and MPI will try)|plm:[rs]sh: Warning: setpgid\(|"
    rb"PMIX ERROR: PMIX_ERR_UNREACH )",
    b"[warn] Epoll MOD(": b"",
}
_ALSO_PASSED = (b"Fatal error in ", b"*** An error occurred in MPI_")  # errors of MPI: the lines that follow explain


def _beginnings(text: bytes) -> bytes:
    """A pattern for any number of a text's first bytes."""
    return b"".join(b"(?:" + re.escape(text[i : i + 1]) for i in range(len(text))) + b")?" * len(text)


_BANNER = re.compile(
    _EQUALS + _HYDRA_HEAD + rb"(?:=  .*\n)*={60,}\n|"
    + _DASHES + _NAMES_OPEN_MPI + rb"(?:.*\n)*?(?P=dashes)\n\0?|"
    + _BEGIN + rb"(?:" + b"|".join(re.escape(start) + rest for start, rest in _LINES.items()) + rb").*\n|^\0+\n",
    re.MULTILINE,
)  # fmt: skip
_UNFINISHED = re.compile(  # what has arrived of a banner
    rb"(?:" + _EQUALS + rb"(?:" + _HYDRA_HEAD + rb"(?s:.*)|" + _beginnings(_HYDRA_HEAD) + rb")|"
    + _DASHES + rb"(?:" + _NAMES_OPEN_MPI + rb"(?s:.*))?|(?<!=)\n?=+|(?<!-)-+|^\0*\n?|"
    + _BEGIN + rb"(?:" + b"|".join(re.escape(start) + b".*|" + _beginnings(start) for start in _LINES) + rb"))\Z",
    re.MULTILINE,
)  # fmt: skip
_LARGEST_BANNER_BYTES = 8192
_CHUNK_BYTES = 1 << 16
_HOLD_S = 0.05  # how long a line waits that may be the start of a banner: launchers write a banner at once
_LOOK_S = 0.5  # between two looks at the deadline
STDOUT, STDERR = 1, 2


class BannerFilter:
    """Splits one output stream of a launcher into what the ranks wrote and the launcher's banners."""

    def __init__(self) -> None:
        self.banners = ""  # those taken out so far, as text
        self.held = b""  # what may become a banner
        self._after_banner = False

    def feed(self, data: bytes) -> bytes:
        """Takes what has just arrived; returns what can be passed on: all but the possible beginning of a banner."""
        if self._after_banner:
            data = data.removeprefix(b"\0")  # Open MPI sends the end of its string along
        self._after_banner = False
        text = _BANNER.sub(self._keep, self.held + data)
        unfinished = _UNFINISHED.search(text, max(0, len(text) - _LARGEST_BANNER_BYTES))
        self.held = unfinished.group() if unfinished else b""
        return text.removesuffix(self.held)

    def release(self, ended: bool = False) -> bytes:
        """What was held back: its rest did not come, so it was no banner. (The end of a banner's line may be late.)"""
        if self.held and _BANNER.fullmatch(self.held + b"\n"):
            return self.feed(b"\n") if ended else b""
        held, self.held = self.held, b""
        return held

    def _keep(self, match: re.Match[bytes]) -> bytes:
        self.banners += match.group().decode(errors="replace")
        self._after_banner = match.end() == len(match.string)
        return match.group() if any(text in match.group() for text in _ALSO_PASSED) else b""


class OutputThread(threading.Thread):
    """Passes one output of the launcher on to this process's, without the launcher's banners, from when it is made.

    A thread, so that a reader that stalls (`program.py | less`) does not keep signals from the ranks; `stalls` says so.
    It ends at `deadline`, of time.monotonic(), even if a process that left the job still holds its pipe open.
    """

    def __init__(self, source: IO[bytes], target: int):
        super().__init__(daemon=True)
        self.filter = BannerFilter()
        self.stalls = False
        self.deadline = math.inf
        self._source, self._target = source, target
        self._last_byte = b"\n"
        self.start()

    def run(self) -> None:
        source = select.poll()
        source.register(self._source, select.POLLIN)
        while True:
            if not source.poll(1000 * (_HOLD_S if self.filter.held else _LOOK_S)):
                self._write(self.filter.release())
                if time.monotonic() > self.deadline:
                    break
            elif data := os.read(self._source.fileno(), _CHUNK_BYTES):
                self._write(self.filter.feed(data))
            else:
                break
        self._write(self.filter.release(ended=True))
        if self._last_byte != b"\n" and self._target == STDERR:
            self._write(b"\n")  # a rank's death has cut its line short, and ours follows
        self._source.close()

    def _write(self, data: bytes) -> None:
        self._last_byte = data[-1:] or self._last_byte
        room, self.stalls = select.poll(), True
        room.register(self._target, select.POLLOUT)
        try:
            while data and room.poll():  # then a pipe has room for PIPE_BUF bytes
                data = data[os.write(self._target, data[: select.PIPE_BUF]) :]
        except OSError:  # EPIPE; EIO of a terminal
            pass
        self.stalls = False
