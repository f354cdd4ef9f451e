"""The processes of a job: launch and join them, watch them for hangs, keep their snapshots, lock
their folders. The options of the compiler, and the faults of an installation.
"""

from shardopt.runtime._compiler_options import compiler_options
from shardopt.runtime._doctor import doctor
from shardopt.runtime._progress import report_progress
from shardopt.runtime._watchdog import watchdog

__all__ = ["compiler_options", "doctor", "report_progress", "watchdog"]
