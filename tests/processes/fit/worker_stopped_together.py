"""One of two processes of a run that gets a signal: `python worker_stopped_together.py RANK PORT FOLDER
PHASE BLOCKED`.

The processes in BLOCKED ("0", "1" or "01") wait in the phase. See test_stops_together.py.
"""

import sys
from pathlib import Path

import jax
from worker_stopped import Run, train

import shardopt as so


class RunOfTwo(Run):
    """A run of two processes."""

    def arrive(self, step):
        """Say that this process is in its phase."""
        rank = jax.process_index()
        partial = self.folder / f"partial-{rank}"
        partial.write_text(str(step))
        partial.rename(self.folder / f"arrived-{rank}")


def main(rank, port, folder, phase, blocked):
    jax.config.update("jax_num_cpu_devices", 2)
    so.initialize(f"127.0.0.1:{port}", 2, rank)
    is_blocked = str(rank) in blocked
    train(folder, phase, run_type=RunOfTwo, is_blocked=is_blocked, rows=so.GlobalRows)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
