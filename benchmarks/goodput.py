"""Predicted goodput with failures, next to four published runs.

Nothing in the prediction is fitted, unless a row says so.

Run: python benchmarks/goodput.py

Each row has inputs that the papers state, and inputs that they do not state or that could not be
read. These are assumed, and listed. A row with an assumed input that decides the result is no
validation. A published interval between failures is on the clock. `mtbf` is time of training, so it
is solved for: the predicted interval equals the published one.

Sources, as far as they could be read:
  Llama 3: arXiv 2407.21783, section 3.3.4, its text. ByteRobust: arXiv 2509.16293, sections 2.2 and
  8, its text and tables. FT-HSDP: arXiv 2602.00277, its abstract; the other numbers from three
  summaries of the paper by others. Decoupled DiLoCo: arXiv 2604.21428, its abstract; the other
  numbers from three summaries by others. The durations of its
    simulated failures stand in none of them.
  ByteCheckpoint: arXiv 2407.20143, table 8, from a summary.
Claim: within 5 points of the published goodput, or the row is marked.
"""

import sys
from typing import NamedTuple

from common import write_json
from failure_simulation import simulate_failures
from recovery_plan import Failures, Recovery, plan_recovery

MINUTE = 60.0
HOUR = 3600.0
DAY = 86400.0
YEAR = 365 * DAY


class Row(NamedTuple):
    """A published run.

    Attributes:
      name: the run.
      published: its goodput, as a share of the time of the chips that train.
      recovery: the prediction.
      failures: the inputs.
      stated: inputs that the paper states.
      assumed: inputs that it does not state.
      kind: "prediction", "bound" if the paper states only a bound, or "calibrated" if an input is
        solved for so that this row holds.
    """

    name: str
    published: float
    recovery: Recovery
    failures: Failures
    stated: str
    assumed: str
    kind: str = "prediction"


def solved(function, target, low, high):
    """Return x with function(x) = target, where the function is monotone, by bisection in the
    logarithm.
    """
    rises = function(high) > function(low)
    for _ in range(80):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if (function(middle) < target) == rises else (low, middle)
    return middle


def with_interval(interval, chips, failures, **periods):
    """Return the failures, and their recovery, whose predicted interval between failures is
    `interval`.
    """

    def recovery(mtbf):
        return plan_recovery(Failures(**failures, mtbf=mtbf), chips=chips, **periods)

    mtbf = solved(
        lambda mtbf: recovery(mtbf).interval,
        interval,
        1e-3 * interval * chips,
        10 * interval * chips,
    )
    return Failures(**failures, mtbf=mtbf), recovery(mtbf)


def llama_3():
    """419 unexpected interruptions in 54 days."""
    interval = 54 * DAY / 419
    chips = 16_384
    save = 405e9 * 14 / 2e12
    for detect, text in (
        (0.0, "failures noticed at once"),
        (600.0, "failures noticed after 10 min, the default time-out"),
    ):
        failures, recovery = with_interval(
            interval, chips, {"restart": 200.0, "save": save, "detect": detect}, spares=0
        )
        stated = "16,384 GPUs, 419 unexpected interruptions in 54 days, 2 TB/s of storage"
        assumed = (
            f"{text}; restart 200 s (FT-HSDP, 16K GPUs); a checkpoint of 14 bytes a parameter stops"
            " training"
        )
        yield Row(
            f"Llama 3, detect {detect:.0f} s", 0.90, recovery, failures, stated, assumed, "bound"
        )


def byterobust():
    """The dense job: 128 explicit, 15 implicit, 12 rolled back and 20 manual incidents in three
    months.
    """
    counts = {"explicit": 128, "implicit": 15, "rollback": 12, "manual": 20}
    detect = {"explicit": 60.0, "implicit": 600.0, "rollback": 60.0, "manual": 0.0}
    restart = {"explicit": 93.0, "implicit": 93.0, "rollback": 4289.0, "manual": 57.0}

    def mean(seconds):
        return sum(counts[kind] * seconds[kind] for kind in counts) / sum(counts.values())

    interval = 90 * DAY / sum(counts.values())
    step = 20.0
    for localize in (120.0, 900.0):
        inputs = {
            "restart": mean(restart),
            "detect": mean(detect) + localize,
            "save": 1.0,
            "snapshot": 0.02,
        }
        periods = {"snapshot_every": step, "step_seconds": step, "spares": 0}
        failures, recovery = with_interval(interval, 9600, inputs, **periods)
        stated = (
            "9,600 GPUs, 175 incidents (table 4), detection (section 2.2), resolution (table 6), a"
            " copy each step (table 8)"
        )
        assumed = (
            f"three months are 90 days; {localize / 60:.0f} min to find the machine (stated: 2 to"
            " 15); a step of 20 s"
        )
        yield Row(
            f"ByteRobust, {localize / 60:.0f} min to find",
            0.97,
            recovery,
            failures,
            stated,
            assumed,
        )


def ft_hsdp():
    """One failure in 18 minutes on 98,304 GPUs."""
    chips = 12 * 8192
    interval = 18 * MINUTE
    failures, recovery = with_interval(
        interval, chips, {"restart": 10 * MINUTE, "save": 0.59}, spares=0
    )
    stated = "98K GPUs, a failure every 18 min, 10 min of recovery"
    assumed = "a checkpoint stops training for 0.59 s (ByteCheckpoint, 405B on 8,960 GPUs)"
    yield Row("FT-HSDP, synchronous", 0.44, recovery, failures, stated, assumed)
    for stall, name in ((180.0, "FT-HSDP"), (280.0, "FT-HSDP, with its stall on rejoining")):
        inputs = {"restart": 10 * MINUTE, "save": 0.59, "islands": (12,), "stall": stall}
        failures, recovery = with_interval(interval, chips, inputs, spares=0)
        stated = f"12 replicas, {stall:.0f} s of stall"
        assumed = "a replica is away for the 10 min of a synchronous recovery"
        yield Row(name, 0.80, recovery, failures, stated, assumed)


def diloco_job(chips, *, stall=None, restart=None):
    """A learner: elastic slices of 256 chips that wait `stall` for each failure, or one job that
    restarts.
    """
    if stall is None:
        failures = Failures(mtbf=YEAR, restart=restart, save=1e-3)
        return failures, plan_recovery(failures, chips=chips, spares=0)
    slices = max(2, chips // 256)
    failures = Failures(mtbf=YEAR, restart=stall, save=1.0, islands=(slices,), stall=stall)
    return failures, plan_recovery(failures, chips=slices * 256, spares=0)


def decoupled_diloco():
    """1.2 and 2.4 million simulated chips that fail once a year each."""
    chips = 1_200_000
    restart = solved(lambda restart: diloco_job(chips, restart=restart)[1].goodput, 0.27, 1.0, 1e4)
    stall = solved(lambda stall: diloco_job(chips, stall=stall)[1].goodput, 0.58, 0.1, 1e3)
    stated = "chips, one failure of a chip a year, learners"
    for scale, published in ((1, 0.27), (2, 0.18)):
        failures, recovery = diloco_job(scale * chips, restart=restart)
        kind = "calibrated" if scale == 1 else "prediction"
        assumed = f"{restart:.0f} s of restart, solved for from the 27%"
        yield Row(
            f"data parallel, {1.2 * scale:.1f}M chips",
            published,
            recovery,
            failures,
            stated,
            assumed,
            kind,
        )
    assumed = (
        f"{stall:.1f} s of stall for each failure, solved for from the 58%; slices of 256 chips"
    )
    runs = (
        (1, 1, 0.58),
        (2, 1, 0.40),
        (1, 2, 0.70),
        (1, 8, 0.88),
        (2, 8, 0.80),
        (1, 16, 0.93),
        (2, 16, 0.86),
    )
    for scale, learners, published in runs:
        failures, recovery = diloco_job(scale * chips // learners, stall=stall)
        name = f"Decoupled DiLoCo, {learners} learners" if learners > 1 else "elastic data parallel"
        kind = "calibrated" if (scale, learners) == (1, 1) else "prediction"
        yield Row(
            f"{name}, {1.2 * scale:.1f}M chips",
            published,
            recovery,
            failures,
            stated,
            assumed,
            kind,
        )


def main():
    rows = [*llama_3(), *byterobust(), *ft_hsdp(), *decoupled_diloco()]
    results = []
    print(f"{'run':40} {'published':>9} {'predicted':>9} {'simulated':>9}  kind")
    for row in rows:
        predicted = row.recovery.training_share
        simulated = None
        if row.recovery.islands <= 12:  # thousands of slices take the simulation minutes
            simulated = simulate_failures(
                row.failures, row.recovery, num_failures=1500
            ).training_share
        points = 100 * (predicted - row.published)
        within = points > -5 if row.kind == "bound" else abs(points) <= 5
        mark = "" if within else "  more than 5 points away"
        shown = "-" if simulated is None else f"{simulated:.1%}"
        print(
            f"{row.name:40} {row.published:9.0%} {predicted:9.1%} {shown:>9}  {row.kind}{mark}",
            flush=True,
        )
        results.append(
            {
                "run": row.name,
                "published": row.published,
                "predicted": round(predicted, 4),
                "simulated": None if simulated is None else round(simulated, 4),
                "points": round(points, 1),
                "within": within,
                "kind": row.kind,
                "stated": row.stated,
                "assumed": row.assumed,
                "failures": {
                    name: getattr(row.failures, name) for name in row.failures.__dataclass_fields__
                },
                "recovery": row.recovery._asdict()
                | {
                    "save_steps": row.recovery.save_steps,
                    "snapshot_steps": row.recovery.snapshot_steps,
                },
            }
        )
    print(write_json(__file__, {"rows": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
