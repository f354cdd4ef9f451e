"""What stragglers cost, synchronous and with bounded staleness: measured, simulated, and by the
closed form.

Run: python benchmarks/stragglers.py [--seconds 12] [--step-ms 80]

Four workers in four threads train one regression; their steps sleep, which is fair on two cores,
and the gradient itself takes a fraction of a millisecond. Control: max_staleness=0, the mean of a
clock applied once. Test: s in {1, 2, 4, unbounded}, each push applied as it comes. Two
disturbances: transient stalls (of each step one in ten takes ten times as long, on all workers) and
a worker that is four times slower for good. Each runs for the same time, the simulator plays the
same durations (the same draws), and forty other draws, whose spread says how much chance there is
in one run. Claims: under stalls pushes per second grow with s; with a worker slower for good only
the unbounded run gains in the long run, (k(n-1)+1)/n = 3.25 times; the simulator predicts both.

Loss is compared at equal time (the end of the run) and at equal updates: as many gradients used as
the synchronous run had, whose updates are means of four.
"""

import argparse
import time

from common import fake_devices, write_json

fake_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so
from shardopt.parameter_server._async_sgd import worker_meshes
from shardopt.parameter_server._optimizer import AsyncOptimizer
from shardopt.parameter_server._server import ServerSettings
from shardopt.parameter_server._worker import sgd_spec

WORKERS = 4
SLOWER = 4
DIM = 64
ROWS = 16
BOUNDS = [0, 1, 2, 4, None]
TRUTH = np.random.default_rng(0).normal(size=DIM).astype(np.float32)


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def sleeper(tx, max_staleness, durations):
    """The `run` of `so.async_sgd`, but each step sleeps first, between pull and push, as a real one
    takes its time.

    A callback in the loss would not do: XLA runs as many as there are cores at once, and four
    workers need four.
    """
    meshes = worker_meshes(jax.devices()[:1] * WORKERS)
    programs = []
    spec = sgd_spec("stragglers", tx, loss_fn, meshes, ServerSettings(max_staleness))

    def slow_compute(batches_of, key):
        if not programs:  # compiled once for all runs
            programs.append(spec.make_compute(batches_of, key))
        (compute,) = programs
        # those of `simulate(seed=0)`
        draws = [np.random.default_rng([0, worker]) for worker in range(WORKERS)]

        def update(worker, params, batch, clock):
            took = durations[worker]
            time.sleep(took(draws[worker]) if callable(took) else took)
            return compute.update(worker, params, batch, clock)

        return compute._replace(update=update)

    spec = spec._replace(make_compute=slow_compute)
    return AsyncOptimizer(spec, spec.make_server(donate=True), (), tx, max_staleness, None).run


def durations_of(name, step):
    """The seconds that a step of each worker takes: numbers, or functions from a random generator."""
    if name == "stalls":
        return [lambda rng: step + 9 * step * (rng.random() < 0.1)] * WORKERS
    return [step] * (WORKERS - 1) + [SLOWER * step]


def closed_form(name, s):
    """Pushes per second over those of s=0, where there is a formula for the long run.

    That for one slow worker is algorithms.md's; that for stalls is our own: the expected maximum of
    n steps over a mean one.
    """
    if s == 0:
        return 1.0
    if name == "one slower":
        return 1.0 if s is not None else (SLOWER * (WORKERS - 1) + 1) / WORKERS
    if s is None:  # a clock waits for the worst of n steps, a free worker for the mean of its own
        worst = 1 + 9 * (1 - 0.9**WORKERS)
        return worst / (1 + 9 * 0.1)
    return None


def measure(name, s, step, seconds):
    """Run threads for so many seconds; return rates and the loss after each update."""
    durations = durations_of(name, step)
    end = [np.inf]

    def batches_of(worker):
        data = np.random.default_rng([1, worker])
        while time.perf_counter() < end[0]:
            x = data.normal(size=(ROWS, DIM)).astype(np.float32)
            y = x @ TRUTH + data.normal(size=ROWS).astype(np.float32)
            yield {"x": x, "y": y}

    rate = 0.02 if s == 0 else 0.02 / WORKERS  # a clock is one step with the mean of four gradients
    run = sleeper(optax.sgd(rate), s, durations)
    params = {"w": np.zeros(DIM, np.float32)}
    run(params, batches_of, num_updates=1 if s == 0 else WORKERS)  # compiles
    end[0] = time.perf_counter() + seconds
    log = (result := run(params, batches_of, num_updates=10**9)).log
    metrics = result.metrics
    began = next(one.time for one in log if one.kind == "pull")
    return {
        "pushes_per_second": metrics["pushes"] / (metrics["seconds"] - began),
        "losses": metrics["history"]["loss"],
        "largest_staleness": max(metrics["staleness"]),
        "wait_share": sum(metrics["wait_seconds"].values()) / (WORKERS * metrics["seconds"]),
    }


def simulate(name, s, step, seconds):
    """Pushes per second in virtual time: with the very durations of the measured run, and with
    forty other draws.
    """
    workers = [so.parameter_server.SimulatedWorker(one) for one in durations_of(name, step)]
    runs = [
        so.parameter_server.simulate(workers, max_staleness=s, until=seconds, seed=seed)
        for seed in range(41)
    ]
    return np.array([run.metrics["pushes_per_second"] for run in runs])


def plot(results, path):
    """Draw pushes per second over those of s=0: measured, played with the same durations and with
    others, formula.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), dpi=160, layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(1, 2), results.items(), strict=True):
        places = np.arange(len(rows))
        rows = dict(rows)
        values = {what: [row[what] for row in rows.values()] for what in rows["0"]}
        axes.bar(places - 0.18, values["ratio"], 0.34, color="#3369b2", label="threads, measured")
        axes.bar(
            places + 0.18,
            values["simulated_ratio"],
            0.34,
            color="#8fa3b8",
            label="simulated, same durations",
        )
        spread = values["other_draws_spread"]
        axes.errorbar(
            places + 0.18,
            values["other_draws_ratio"],
            spread,
            fmt="o",
            color="#22272e",
            markersize=4,
            capsize=3,
            label="simulated, others",
        )
        known = [
            (x, y) for x, y in zip(places, values["formula_ratio"], strict=True) if y is not None
        ]
        axes.scatter(
            *zip(*known, strict=True),
            marker="_",
            s=500,
            color="#c04a3a",
            zorder=3,
            label="closed form",
        )
        axes.set_xticks(places, ["unbounded" if s == "None" else f"s = {s}" for s in rows])
        axes.set_title(
            {"stalls": "transient stalls", "one slower": "one worker four times slower"}[name],
            loc="left",
        )
        axes.set_ylabel("pushes per second over those of s = 0")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path)


def tail(losses, count):
    """The mean of the last tenth of so many losses: single ones are noisy."""
    used = losses[:count]
    return float(np.mean(used[-max(1, len(used) // 10) :])) if len(used) else float("nan")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--step-ms", type=float, default=80.0)
    options = parser.parse_args()
    step = options.step_ms / 1e3
    results = {}
    print(
        f"{WORKERS} workers, steps of {options.step_ms:g} ms, {options.seconds:g} s each; ratios to"
        " max_staleness=0"
    )
    for name in ("stalls", "one slower"):
        print(
            f"\n{name:12} pushes/s  measured  same draws  other draws    formula   loss at equal"
            " time, gradients  waits"
        )
        rows = {str(s): measure(name, s, step, options.seconds) for s in BOUNDS}
        base = rows["0"]
        virtual = simulate(name, 0, step, options.seconds)
        gradients = len(base["losses"]) * WORKERS
        for s in BOUNDS:
            row = rows[str(s)]
            losses = row.pop("losses") if s != 0 else row["losses"]
            row["ratio"] = row["pushes_per_second"] / base["pushes_per_second"]
            draws = simulate(name, s, step, options.seconds)
            row["simulated_pushes_per_second"] = float(draws[0])
            row["simulated_ratio"] = float(draws[0] / virtual[0])
            row["other_draws_ratio"] = float(np.mean(draws[1:] / virtual[1:]))
            row["other_draws_spread"] = float(np.std(draws[1:] / virtual[1:]))
            row["formula_ratio"] = closed_form(name, s)
            row["loss_at_equal_time"] = tail(losses, len(losses))
            row["loss_at_equal_gradients"] = tail(losses, gradients if s != 0 else len(losses))
            formula = "       -" if row["formula_ratio"] is None else f"{row['formula_ratio']:8.2f}"
            print(
                f"s={s!s:10} {row['pushes_per_second']:8.1f}  {row['ratio']:8.2f} "
                f" {row['simulated_ratio']:10.2f}  {row['other_draws_ratio']:6.2f}"
                f" ±{row['other_draws_spread']:.2f}  {formula}   {row['loss_at_equal_time']:14.3f}"
                f" {row['loss_at_equal_gradients']:12.3f} {row['wait_share']:7.0%}"
            )
        base.pop("losses")
        results[name] = rows
    path = write_json(
        __file__, {"step_ms": options.step_ms, "seconds": options.seconds, "runs": results}
    )
    plot(results, path.with_suffix(".png"))
    print("\nwrote", path, "and a picture beside it")


if __name__ == "__main__":
    main()
