"""A sweep on a Slurm cluster: one job array through submitit, one task of it a run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobn_finetune.errors import ConfigError
from isobn_finetune.run_folder import write_json
from isobn_finetune.sweep_config import PlannedRun, SlurmConfig
from isobn_finetune.sweep_run import PRIVATE, execute

if TYPE_CHECKING:
    from isobn_finetune.sweep import Sweep

JOBS_FILE = "slurm_jobs.json"
ALIVE = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING")
"""States in which Slurm still has the job."""


def submit(sweep: Sweep, retry_failed: bool = False) -> str:
    """Submits the runs that are missing and not already with Slurm, and returns what was done in words.

    Runs that start from others' models form a further array, which waits until the one before it has ended.

    Raises:
        ConfigError: submitit is not installed, or there is no Slurm.
    """
    from isobn_finetune.sweep import start_folder

    executor = _create_executor(sweep)
    start_folder(sweep)
    jobs = load_jobs(sweep.folder)
    known = get_states()
    alive = {path for path, job in jobs.items() if known.get(job) in ALIVE}
    todo = [run for run in sweep.pending(retry_failed) if run.path not in alive]
    levels: dict[int, list[PlannedRun]] = {}
    depths: dict[str, int] = {}
    for run in todo:  # sources come before what starts from them
        depths[run.path] = max((depths[path] + 1 for path in run.sources if path in depths), default=0)
        levels.setdefault(depths[run.path], []).append(run)
    lines = []
    queued = set(alive)
    for level in sorted(levels):
        runs = levels[level]
        before = {jobs[path].partition("_")[0] for run in runs for path in run.sources if path in queued}
        executor.update_parameters(**_parameters(sweep.config.slurm, sorted(before)))
        places, retries = [sweep.folder.resolve()] * len(runs), [retry_failed] * len(runs)
        submitted = executor.map_array(SweepJob(), runs, places, retries)
        jobs |= {run.path: job.job_id for run, job in zip(runs, submitted, strict=True)}
        write_json(sweep.folder / JOBS_FILE, jobs)
        queued |= {run.path for run in runs}
        lines.append(f"Submitted {len(runs)} runs as job array {submitted[0].job_id.partition('_')[0]}.")
    if alive:
        lines.append(f"{len(alive)} runs are with Slurm already.")
    if not todo and not alive:
        lines.append("Nothing is left to do.")
    return "\n".join([*lines, "--status shows where each run stands."])


class SweepJob:
    """Body of a job. A run that is over is left alone; one that another job is on is waited for."""

    def __call__(self, run: PlannedRun, sweep_dir: Path, retry_failed: bool) -> str:
        """Does the run and returns its status."""
        return execute(run, sweep_dir, retry_failed, wait=True).status

    def checkpoint(self, run: PlannedRun, sweep_dir: Path, retry_failed: bool) -> Any:
        """What submitit queues again when the job is preempted or its time is up: the run goes on where it saved."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, run, sweep_dir, False)


def read_jobs(sweep: Sweep) -> dict[str, str]:
    """Path of a run to its job in words, ``123_4 (RUNNING)``; empty where nothing was submitted."""
    jobs = load_jobs(sweep.folder)
    known = get_states() if jobs else {}
    return {path: f"{job} ({known.get(job, 'no longer with Slurm')})" for path, job in jobs.items()}


def load_jobs(folder: Path) -> dict[str, str]:
    """Reads the job ids that `submit` left in the sweep's folder.

    Raises:
        ConfigError: The file is damaged.
    """
    file = folder / JOBS_FILE
    if not file.is_file():
        return {}
    try:
        jobs = json.loads(file.read_text(encoding="utf-8"))
        return {str(path): str(job) for path, job in jobs.items()}
    except (ValueError, AttributeError):
        raise ConfigError(f"{file}: not a list of jobs; remove it, and look for running jobs with squeue") from None


def get_states() -> dict[str, str]:
    """Asks Slurm for the states of this user's jobs, by job id; jobs that ended long ago are forgotten."""
    command = ["squeue", "--me", "--array", "--noheader", "--states=all", "--format=%i %T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(line.split()[:2] for line in answer.stdout.splitlines() if len(line.split()) >= 2)


def _create_executor(sweep: Sweep) -> Any:
    try:
        import submitit
    except ImportError:
        raise ConfigError("--launcher slurm needs submitit: pip install 'isobn-finetune[slurm]'") from None
    try:
        return submitit.SlurmExecutor(folder=sweep.folder.resolve() / PRIVATE / "slurm")
    except RuntimeError as error:
        raise ConfigError(f"--launcher slurm: {error}; use --launcher local, or a machine with Slurm") from None


def _parameters(config: SlurmConfig, after: Sequence[str]) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "job_name": "isobn-finetune",
        "time": config.time,
        "cpus_per_task": config.cpus,
        "mem": config.memory,
        "array_parallelism": config.max_parallel,
        "signal_delay_s": 120,
        "setup": [f"export OMP_NUM_THREADS={config.cpus}", "export TOKENIZERS_PARALLELISM=false"],
        "dependency": f"afterany:{':'.join(after)}" if after else None,
    }
    if config.partition is not None:
        parameters["partition"] = config.partition
    if config.gpus:
        parameters["gpus_per_node"] = config.gpus
    return parameters
