"""Worker processes on this machine that take run after run of a sweep."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from isobn_finetune.errors import InterruptedRunError
from isobn_finetune.live_view import View
from isobn_finetune.sweep_config import PlannedRun
from isobn_finetune.sweep_run import PRIVATE, RunState, execute

logger = logging.getLogger(__name__)

PATIENCE = 0.5
"""Seconds between looks at runs that another sweep is on."""


class Worker:
    """A process that does what it is sent, one run after the other.

    Args:
        sweep_dir: The sweep's folder.
        number: Of this worker, from 0.
        jobs: Workers in all.
        retry_failed: Start failed runs afresh.
    """

    def __init__(self, sweep_dir: Path, number: int, jobs: int, retry_failed: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.run: PlannedRun | None = None
        self.process = context.Process(
            target=_work, args=(theirs, sweep_dir, number, retry_failed), name=f"worker {number}", daemon=True
        )
        with _environment(share_of_machine(number, jobs, os.environ)):
            self.process.start()
        theirs.close()

    def send(self, run: PlannedRun) -> None:
        """Gives it a run."""
        self.run = run
        self.connection.send(run)

    def stop(self) -> None:
        """Lets it end; it has nothing to do."""
        try:
            self.connection.send(None)
        except OSError:  # it has ended already
            pass


class Pool:
    """Does runs in several processes.

    Args:
        sweep_dir: The sweep's folder.
        jobs: Processes.
        retry_failed: Start failed runs afresh.
    """

    def __init__(self, sweep_dir: Path, jobs: int, retry_failed: bool) -> None:
        self.sweep_dir = sweep_dir
        self.jobs = jobs
        self.retry_failed = retry_failed
        self.workers: list[Worker] = []
        self.interrupted: str | None = None
        self.next_number = 0

    def run(self, pending: list[PlannedRun], states: Mapping[str, RunState], view: View) -> None:
        """Does the runs, each after those from which it starts.

        Raises:
            InterruptedRunError: A signal came; the runs under way have saved.
        """
        waiting = list(pending)
        try:
            with self._signals():
                while (waiting or any(worker.run for worker in self.workers)) and not self._is_stopped():
                    if not self.interrupted:
                        self._hand_out(waiting, states, view)
                    self._collect(waiting, view)
        finally:
            for worker in self.workers:
                worker.stop()
            for worker in self.workers:
                worker.process.join(timeout=10)
                if worker.process.is_alive():
                    worker.process.kill()
        if self.interrupted:
            raise InterruptedRunError(f"interrupted by {self.interrupted}; started again, the sweep goes on")

    def _is_stopped(self) -> bool:
        return self.interrupted is not None and not any(worker.run for worker in self.workers)

    def _hand_out(self, waiting: list[PlannedRun], states: Mapping[str, RunState], view: View) -> None:
        while len(self.workers) < min(self.jobs, len(waiting) + sum(w.run is not None for w in self.workers)):
            self.workers.append(Worker(self.sweep_dir, self.next_number, self.jobs, self.retry_failed))
            self.next_number += 1
        undone = {run.path for run in waiting} | {w.run.path for w in self.workers if w.run is not None}
        for worker in self.workers:
            if worker.run is not None:
                continue
            run = next((run for run in waiting if not undone.intersection(run.sources)), None)
            if run is None:
                return
            waiting.remove(run)
            view.begin(run)
            worker.send(run)

    def _collect(self, waiting: list[PlannedRun], view: View) -> None:
        """Takes in what workers report, and replaces those that died."""
        busy = [worker for worker in self.workers if worker.run is not None]
        ready = wait([worker.connection for worker in busy], timeout=PATIENCE)
        for worker in [worker for worker in busy if worker.connection in ready]:
            run = worker.run
            assert run is not None
            try:
                state = worker.connection.recv()
            except (EOFError, OSError):
                state = self._bury(worker)
            worker.run = None
            if state.status == "busy":  # another sweep is on it: look again after the others
                waiting.append(run)
                time.sleep(PATIENCE)
            if state.status == "interrupted" and self.interrupted is None:
                self.interrupted = "a signal"
            view.end(run, state)

    def _bury(self, worker: Worker) -> RunState:
        worker.process.join(timeout=5)
        code = worker.process.exitcode
        self.workers.remove(worker)
        if self.interrupted:
            return RunState("begun")
        cause = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        # Nothing is recorded in the run's folder: started again, the sweep resumes it.
        return RunState("failed", reason=f"its process died ({cause}); out of memory is the usual cause")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Hands Ctrl-C and SIGTERM on to the workers, which save and stop; a second one stops them at once."""

        def take(number: int, frame: FrameType | None) -> None:
            self.interrupted = signal.Signals(number).name
            logger.info("%s: waiting for %d runs to save; again to stop at once.", self.interrupted, len(self.workers))
            for worker in self.workers:
                if worker.run is not None and worker.process.pid:
                    os.kill(worker.process.pid, signal.SIGTERM)

        previous = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def share_of_machine(number: int, jobs: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of one worker: one GPU where there are any, and its share of the CPU's threads.

    Args:
        number: Of the worker, from 0.
        jobs: Workers in all.
        environment: This process's; limits in it are kept.
    """
    gpus = visible_gpus(environment)
    given = environment.get("OMP_NUM_THREADS", "")
    available = int(given) if given.isdigit() else (len(os.sched_getaffinity(0)) if _HAS_AFFINITY else os.cpu_count())
    threads = max(1, (available or 1) // jobs)
    share = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if gpus:
        share["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    return share


_HAS_AFFINITY = hasattr(os, "sched_getaffinity")


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Ids of the GPUs that processes may use, as ``CUDA_VISIBLE_DEVICES`` names them. Touches no GPU."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip() not in ("", "-1")]
    devices = Path("/proc/driver/nvidia/gpus")
    return [str(index) for index in range(len(list(devices.iterdir())))] if devices.is_dir() else []


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """For a child to be born into."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(connection: Connection, sweep_dir: Path, number: int, retry_failed: bool) -> None:
    """Body of a worker process."""
    os.setpgrp()  # Ctrl-C reaches the parent alone, which hands it on once
    threading.Thread(target=_die_with_parent, daemon=True).start()
    log = sweep_dir / PRIVATE / "logs" / f"worker_{number}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8", buffering=1) as file:
        sys.stdout = sys.stderr = file
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        logging.getLogger("isobn_finetune").setLevel(logging.INFO)
        _take_runs(connection, sweep_dir, retry_failed)


def _take_runs(connection: Connection, sweep_dir: Path, retry_failed: bool) -> None:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    while (run := _receive(connection)) is not None:
        try:
            connection.send(execute(run, sweep_dir, retry_failed))
        except (InterruptedRunError, KeyboardInterrupt):
            connection.send(RunState("interrupted"))
            return


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return None


def _die_with_parent() -> None:
    """A sweep killed with ``kill -9`` leaves no run behind that would go on beside the next one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
