"""The processes of a job: launch and join them, watch them for hangs, keep their snapshots, lock
their folders.
"""

from shardopt.runtime._probe import probe_devices
from shardopt.runtime._progress import report_progress
from shardopt.runtime._watchdog import watchdog

__all__ = ["probe_devices", "report_progress", "watchdog"]
