"""The time of a compiled TPU program, estimated without a TPU: XLA's own cycles along its schedule, and
published link rates.

Scripts of `benchmarks` compare programs by it.
"""

from step_times._compiled_time import CompiledOperation, StepSeconds, of_report, step_seconds
from step_times._flops import step_flops

__all__ = ["CompiledOperation", "StepSeconds", "of_report", "step_flops", "step_seconds"]
