"""Workers as threads of this process, one a worker, each with devices of its own; the server behind one lock."""

import threading
from collections.abc import Mapping, Sequence

from shardopt.parameter_server.compute import Compute
from shardopt.parameter_server.run import Run
from shardopt.parameter_server.transports.settings import settings_here

Presence = Mapping[int, Sequence[tuple[int, float]]]


def run_threads(run: Run, compute: Compute, *, num_workers: int, num_updates: int, presence: Presence) -> str:
    """Drive a run until `num_updates` updates are there or no worker is left, and return which it was.

    Threads wait for one another in one place only, a condition variable, for one of three things to come true: the
    bound lets them start, they are due to join, or all is over. Whatever ends the run, every thread has ended when
    this returns.

    Args:
      run: the server, fresh.
      compute: what the workers do.
      num_workers: how many.
      num_updates: the version to stop at; pushes under way then are dropped.
      presence: worker -> periods `(from, to)` in versions when it is there. At `to` it dies with what it computes.

    Returns:
      "completed" or "exhausted".

    Raises:
      BaseException: what a worker raised, with its traceback and a note saying which worker it was.
    """
    crew = _Crew(run, compute, num_updates, {worker: list(presence[worker]) for worker in range(num_workers)})
    settings = settings_here()

    def work(worker: int) -> None:
        with settings():
            crew.work(worker)

    names = [f"shardopt-worker-{worker}" for worker in range(num_workers)]
    threads = [threading.Thread(target=work, args=(worker,), name=names[worker]) for worker in range(num_workers)]
    if num_updates == 0:
        return "completed"
    for worker in range(num_workers):
        crew.join_if_due(worker)  # in order, before anyone is fast enough to matter
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C reaches the main thread only
        crew.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    if crew.errors:
        raise crew.errors[0]
    return "completed" if run.state.version >= num_updates else "exhausted"


class _Crew:
    """What the threads of a run share."""

    def __init__(self, run: Run, compute: Compute, num_updates: int, periods: dict[int, list[tuple[int, float]]]):
        self.run, self.compute, self.num_updates = run, compute, num_updates
        self.periods = periods  # those not begun yet
        self.until: dict[int, float] = {}  # of those begun: when they end
        self.stopped = False
        self.errors: list[BaseException] = []
        self.changed = threading.Condition()

    def work(self, worker: int) -> None:
        """Live through every period of a worker's presence."""
        try:
            while self.join(worker):
                self.compute.begin(worker)
                while self.step(worker):
                    pass
        except BaseException as error:  # the caller of run gets it
            with self.changed:
                steps = self.run.state.clock.steps
                at = f" at its step {steps[worker]}" if worker in steps else ""
                error.add_note(f"This happened in worker {worker} of async_sgd{at}.")
                self.errors.append(error)
            self.stop()

    def stop(self) -> None:
        """Let every thread end at the next chance."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def join(self, worker: int) -> bool:
        """Wait until the worker is there; say False if it never will be again."""
        with self.changed:
            self.changed.wait_for(lambda: self.over() or worker in self.until or self.due(worker) or self.stuck())
            if self.over():
                return False
            if worker in self.until:
                return True
            joined = self.join_if_due(worker)
            self.changed.notify_all()
            return joined

    def join_if_due(self, worker: int) -> bool:
        """Begin the worker's next period if it is time."""
        if not self.due(worker):
            return False
        self.run.join(worker)
        self.until[worker] = self.periods[worker].pop(0)[1]
        return True

    def step(self, worker: int) -> bool:
        """Do one step; say False if the worker has left, or all is over."""
        batch = self.compute.next_batch(worker)
        asked = self.run.now()
        with self.changed:
            self.changed.wait_for(lambda: self.over() or self.dead(worker) or self.run.may_pull(worker))
            if self.over():
                return False
            if batch is None or self.dead(worker):
                return self.leave(worker, asked)
            pulled = self.run.pull(worker, asked)
            params = self.run.state.params
        update = self.compute.update(worker, params, batch, pulled.clock)
        with self.changed:
            if self.over():
                return False
            if self.dead(worker):
                return self.leave(worker)
            self.run.push(worker, update, pulled.version)
            self.changed.notify_all()
        return True

    def leave(self, worker: int, asked: float | None = None) -> bool:
        """Let the worker go, with whatever it was computing."""
        self.run.leave(worker, asked)
        del self.until[worker]
        self.changed.notify_all()
        return False

    def over(self) -> bool:
        """Whether every thread is to end."""
        return self.stopped or self.run.state.version >= self.num_updates

    def due(self, worker: int) -> bool:
        """Whether the worker's next period has come."""
        periods = self.periods[worker]
        return bool(periods) and worker not in self.until and periods[0][0] <= self.run.state.version

    def dead(self, worker: int) -> bool:
        """Whether the worker's present period is at its end."""
        return self.run.state.version >= self.until[worker]

    def stuck(self) -> bool:
        """Whether nobody is there and nobody is due: no version will ever come for which others wait."""
        return not self.until and not any(self.due(worker) for worker in self.periods)
