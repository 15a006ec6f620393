"""Runs that outlive a click: worker processes, progress, cancelling, and results that are computed once.

The page never runs a simulation itself. A job is known by what it computes, so two browsers that ask for the same share
it, and asking again finds the result. Nothing here knows Streamlit.
"""

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from dashboard.limits import Limits

LEFT_S = 30.0
"""A job that nobody has looked at for so long is ended: its page was left."""

AWAY_S = 3.0
"""Whoever has not looked for so long has no say where another cancels; a page looks several times a second."""

ENDS_S = 5.0
"""A process that answers no more has so long to end by itself."""


@dataclass
class Job:
    """One computation; read by pages, written by its worker's thread."""

    key: str
    kind: str
    payload: Mapping[str, Any]
    state: str = "waiting"
    """waiting, running, done, failed or cancelled."""
    done: int = 0
    total: int | None = None
    text: str = ""
    """How far it is, in words."""
    result: Any = None
    error: str = ""
    seconds: float | None = None
    """What it took."""
    watchers: dict[str, float] = field(default_factory=dict)
    """Session -> when it last looked."""
    is_unwanted: bool = False
    """Whether somebody has cancelled it."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ("done", "failed", "cancelled")


class Jobs:
    """The jobs of one server, and the processes that do them."""

    def __init__(self, limits: Limits, workers: int = 2) -> None:
        self._limits = limits
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._waiting: list[Job] = []
        self._changed = threading.Condition()
        self._is_open = True
        self._workers = [Worker(limits) for _ in range(workers)]
        self.computed = 0
        """Jobs that were begun."""
        for worker in self._workers:
            threading.Thread(target=self._serve, args=(worker,), daemon=True).start()
        threading.Thread(target=self._reap, daemon=True).start()

    def ask(self, kind: str, payload: Mapping[str, Any], session: str) -> Job:
        """The job that computes this: a new one, or the one that somebody began already. Failed ones are begun anew."""
        text = json.dumps([kind, payload], sort_keys=True, ensure_ascii=False)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        with self._changed:
            job = self._jobs.get(key)
            if job is None or job.state in ("failed", "cancelled"):
                job = Job(key, kind, payload)
                if len(self._waiting) >= self._limits.waiting:
                    job.state, job.error = (
                        "failed",
                        "too many runs are waiting; try again in a minute",
                    )
                    return job
                self._jobs[key] = job
                self._waiting.append(job)
                self._changed.notify_all()
            self._jobs.move_to_end(key)
            job.watchers[session] = time.monotonic()
            self._forget()
            return job

    def look(self, key: str, session: str) -> Job | None:
        """A job by its key, and that the session still cares for it. None if it was forgotten."""
        with self._changed:
            job = self._jobs.get(key)
            if job is not None and not job.is_over:
                job.watchers[session] = time.monotonic()
            return job

    def cancel(self, key: str, session: str) -> None:
        """The session wants it no more; it is ended unless another does."""
        with self._changed:
            job = self._jobs.get(key)
            if job is not None and not job.is_over:
                job.watchers.pop(session, None)
                job.is_unwanted = True
                self._end_if_left(job)

    def close(self) -> None:
        """End every process."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        for worker in self._workers:
            worker.kill()

    def _end(self, job: Job) -> None:
        """With the lock held."""
        job.state = "cancelled"
        if job in self._waiting:
            self._waiting.remove(job)
        for worker in self._workers:
            if worker.job is job:
                worker.kill()

    def _forget(self) -> None:
        """With the lock held: the results asked for longest ago go first."""
        over = [key for key, job in self._jobs.items() if job.is_over]
        for key in over[: max(0, len(over) - self._limits.kept)]:
            del self._jobs[key]

    def _serve(self, worker: "Worker") -> None:
        worker.start()
        while True:
            with self._changed:
                while self._is_open and not self._waiting:
                    self._changed.wait()
                if not self._is_open:
                    return
                job = self._waiting.pop(0)
                job.state, worker.job = "running", job
                self.computed += 1
            start = time.monotonic()
            timer = threading.Timer(self._limits.run_s, self._overdue, (worker, job))
            timer.daemon = True
            timer.start()
            ended = worker.do(job)
            timer.cancel()
            with self._changed:
                worker.job = None
                job.seconds = time.monotonic() - start
                if job.state == "running":
                    job.state = ended
            if self._is_open and not worker.is_alive:
                worker.start()

    def _overdue(self, worker: "Worker", job: Job) -> None:
        with self._changed:
            if worker.job is job and job.state == "running":
                job.error = f"ended after {self._limits.run_s:.0f} s: too long for a page; twin run has no such limit"
                job.state = "failed"
                worker.kill()

    def _reap(self) -> None:
        """End what nobody looks at any more."""
        while self._is_open:
            time.sleep(1)
            with self._changed:
                for job in list(self._jobs.values()):
                    if not job.is_over:
                        self._end_if_left(job)

    def _end_if_left(self, job: Job) -> None:
        """With the lock held: end it if nobody looks at it any more."""
        now, patience = time.monotonic(), AWAY_S if job.is_unwanted else LEFT_S
        if all(now - at > patience for at in job.watchers.values()):
            self._end(job)


class Worker:
    """One process that does one job at a time; a killed one is replaced."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[str] | None = None
        self._is_killed = False
        self.job: Job | None = None

    @property
    def is_alive(self) -> bool:
        """Whether there is a process that can take a job."""
        # A process that was killed a moment ago still looks alive.
        return self._process is not None and not self._is_killed and self._process.poll() is None

    def start(self) -> None:
        """Begin a process; it loads what runs need before it is asked."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._is_killed = False
        command = [sys.executable, "-m", "dashboard.work", str(self._limits.memory_bytes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def kill(self) -> None:
        """End the process in the middle of whatever it does."""
        self._is_killed = True
        if self._process is not None:
            self._process.kill()

    def do(self, job: Job) -> str:
        """Do it; the state it ends in. Progress, result and error are put into the job as they come."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            job.error = "there is no process to run it; try again"
            return "failed"
        try:
            process.stdin.write(json.dumps({"kind": job.kind, "payload": job.payload}) + "\n")
            process.stdin.flush()
            return self._listen(process.stdout, job)
        except (OSError, ValueError):
            job.error = job.error or self._why_it_ended(process)
            self._is_killed = True
            return "failed"

    def _why_it_ended(self, process: "subprocess.Popen[str]") -> str:
        """What became of a process that has stopped answering."""
        if self._is_killed:
            return "ended from outside, before there was a result"
        try:
            code = process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return "the process that ran it stopped answering: an error of the dashboard"
        most = f"{self._limits.memory_bytes >> 20:,} MiB"
        if code < 0:
            return (
                f"the process that ran it was ended by signal {-code}, as systems do where memory runs out (a page may "
                f"take {most}); a smaller run may fit"
            )
        return (
            f"the process that ran it ended by itself (exit status {code}): an error of the dashboard, told in the log "
            "of the server"
        )

    @staticmethod
    def _listen(stdout: IO[str], job: Job) -> str:
        for line in stdout:
            told = json.loads(line)
            match told["is"]:
                case "progress":
                    job.done, job.total, job.text = told["done"], told["total"], told["text"]
                case "done":
                    job.result = told["result"]
                    return "done"
                case _:
                    job.error = told["error"]
                    return "failed"
        raise OSError("the process has ended")
