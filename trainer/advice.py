"""Where the time of a run goes, and which number of processes and mode would suit it: Amdahl's law on measured phases.

All times are wall-clock times. Rollouts are shared by all processes. Under `gather` the update is rank 0's, with the
whole machine; under `average` it is shared too, and every optimizer step costs an exchange among all. Processes beyond
the cores gain time only where they wait for something else than a core, as environments may that are not computed here.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from trainer.config import Config

FIRST, LAST = 2, 6  # iterations that are measured; the first one warms up
WORTH = 0.2  # what another number of processes has to gain, by the cautious estimate
REACHED = 0.75  # the part of a rollout's ideal gain that is counted on
STEP_S = 3e-4  # of an optimizer step, however few rows it has: some 40 operations of a framework
NAPS = 0.5  # an environment that sleeps gives its core up so often per step, or more
PHASES = ("rollout", "gather", "update", "bcast")
Way = tuple[str, int]  # "gather" or "average", and a number of processes, 1 or more


@dataclass
class Measured:
    """Sums over the iterations measured, in seconds of wall-clock time where nothing else is said.

    Attributes:
        rollout, gather, update, bcast: of the phases, on rank 0.
        busy, away: of work in the rollouts, all processes together: in all, and neither on a core nor waiting for one.
        naps: how often that work gave its core up by itself.
        env_steps: of the environments.
        steps: number of optimizer steps.
        width: cores that a process's update used, summed over the iterations.
        exchange: of one exchange among all processes, as an optimizer step under `average` needs it.
    """

    rollout: float = 0.0
    gather: float = 0.0
    update: float = 0.0
    bcast: float = 0.0
    busy: float = 0.0
    away: float = 0.0
    naps: float = 0.0
    env_steps: int = 0
    steps: int = 0
    width: float = 0.0
    exchange: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return self.rollout + self.gather + self.update + self.bcast

    @property
    def asleep(self) -> float:
        """Share of the rollouts' work in which environments slept; 0 where a host took the core away instead."""
        return min(self.away / self.busy, 0.999) if self.busy and self.naps >= NAPS * self.env_steps else 0.0


@dataclass(frozen=True)
class Machine:
    """What a number of processes has to share.

    Attributes:
        cores: that the run may use. pieces: episodes or environments of an iteration.
    """

    cores: int
    pieces: int

    def speed(self, n: int, asleep: float) -> float:
        """Rollouts of `n` processes at a time, in those of one that has a core."""
        return min(n, self.cores / (1.0 - asleep), self.pieces)


def estimate(measured: Measured, way: Way, now: Way, machine: Machine, reached: float = 1.0) -> float:
    """Seconds that the measured iterations would take another `way`; `now` is that of the run that was measured.

    Args:
        reached: the part of the ideal gain of what is shared that is counted on.
    """
    (mode, n), (now_mode, now_n), cores = way, now, machine.cores
    if way == now:
        return measured.total

    def share(seconds: float, gain: float) -> float:
        return seconds / (1.0 + (gain - 1.0) * (reached if gain > 1.0 else 1.0))

    gain = machine.speed(n, measured.asleep) / machine.speed(now_n, measured.asleep)
    rest = share(measured.rollout, gain) + measured.gather + measured.bcast
    if mode == now_mode == "gather":
        return rest + measured.update
    exchanged = measured.steps * measured.exchange if now_mode == "average" else 0.0
    computed = max(measured.update - exchanged, 0.0)
    fixed = min(measured.steps * STEP_S, computed)
    width = now_n if now_mode == "average" else measured.width / (LAST - FIRST + 1)
    wanted = n if mode == "average" else 1  # rank 0 under `gather` may use more cores; that is not counted on
    update = fixed + share(computed - fixed, min(wanted, cores) / min(width, cores))
    exchange = measured.exchange * max(1.0, n / max(now_n, cores)) if mode == "average" else 0.0
    return rest + update + measured.steps * exchange


def advise(measured: Measured, now: Way, machine: Machine) -> str:
    """What a person is told, two lines. Never promises more than `n` processes can bring."""
    mode, n = now
    powers = {n, *(2**k for k in range(7) if 2**k <= 2 * max(machine.cores, n)), machine.cores}
    counts = sorted(k for k in powers if k <= max(machine.pieces, n))
    modes = ("gather", "average") if n > 1 else ("gather",)  # what an exchange takes is not known before there is one
    ways = [now, *((m, k) for m in modes for k in counts if k > 1 or m == "gather")]
    times = {way: estimate(measured, way, now, machine, REACHED) for way in ways}
    choice = next(way for way in ways if times[way] <= (1.0 + WORTH) * min(times.values()))
    shares = ", ".join(f"{name} {getattr(measured, name) / measured.total:.0%}" for name in PHASES)
    seconds = measured.total / (LAST - FIRST + 1)
    cores = f"{machine.cores} core{'s' * (machine.cores > 1)}"
    first = f"time: {shares} of {seconds:.2f} s an iteration, with {n} process{'es' * (n > 1)} on {cores}\n"
    rest = max(measured.total - measured.rollout, 1e-9)
    bound = f"; if rollouts took no time, it would be {measured.total / rest:.1f} x as fast"
    bound *= mode == "gather"
    if choice == now:
        return f"{first}no other --nprocs or --parallel is expected to be clearly faster here{bound}"
    most = choice[1] / n if choice[0] == mode and choice[1] > n else choice[1]
    low, high = (min(measured.total / t, most) for t in (times[choice], estimate(measured, choice, now, machine)))
    how = f"--nprocs {choice[1]}" + f" --parallel {choice[0]}" * (choice[0] != mode)
    return f"{first}{how} is likely to be {low:.1f} to {high:.1f} x as fast{bound}"


class Advice:
    """Collects the phases of the first iterations, and speaks once."""

    def __init__(self, config: Config, n: int, cores: int):
        """Args: config: of the run. n: its number of processes. cores: that it may use."""
        pieces = config.num_envs if config.batch_steps else config.batch_size
        self.now, self.machine = (config.parallel, n), Machine(cores, pieces)
        self.iteration = 0
        self.measured = Measured()

    @property
    def needs_exchange(self) -> bool:
        """True in the iteration after which an exchange has to be measured; the same on all ranks."""
        return self.iteration == LAST - 1 and self.now[1] > 1

    def after(
        self,
        seconds: dict[str, float],
        work: Sequence[float],
        env_steps: int,
        update: tuple[int, int],
        exchange_s: float,
    ) -> str:
        """Takes in an iteration.

        Args:
            seconds: of the phases. work: (busy, away, naps) as Measured has them. update: (steps, width).
            exchange_s: seconds of one exchange, in the iteration that needs it.

        Returns:
            The advice, after the last iteration that is measured; else "".
        """
        self.iteration += 1
        if not FIRST <= self.iteration <= LAST:
            return ""
        values = (*(seconds[name] for name in PHASES), *work, env_steps, *update, exchange_s)
        for field, value in zip(fields(Measured), values):
            setattr(self.measured, field.name, getattr(self.measured, field.name) + value)
        return advise(self.measured, self.now, self.machine) if self.iteration == LAST else ""


def timed(exchange: Callable[[], object], n: int = 20) -> float:
    """Median seconds of a call, of `n`."""
    times = []
    for _ in range(n):
        began = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - began)
    return sorted(times)[n // 2]
