"""What stragglers cost, synchronous and with bounded staleness: measured, simulated, and by the closed form.

Run: python benchmarks/stragglers.py [--seconds 12] [--step-ms 40]

Four workers in four threads train one regression; their steps sleep, which is fair on two cores, and the gradient
itself takes a fraction of a millisecond. Control: max_staleness=0, the mean of a clock applied once. Test: s in
{1, 2, 4, unbounded}, each push applied as it comes. Two disturbances: transient stalls (of each step one in ten takes
ten times as long, on all workers) and a worker that is four times slower for good. Each runs for the same time, the
simulator plays the same durations. Claims: under stalls pushes per second grow with s; with a worker slower for good
only the unbounded run gains in the long run, (k(n-1)+1)/n = 3.25 times; the simulator predicts both.

Loss is compared at equal time (the end of the run) and at equal updates: as many gradients used as the synchronous
run had, whose updates are means of four.
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

WORKERS, SLOWER, DIM, ROWS = 4, 4, 64, 16
BOUNDS = [0, 1, 2, 4, None]
TRUTH = np.random.default_rng(0).normal(size=DIM).astype(np.float32)


def nap(seconds):
    time.sleep(float(seconds[0]))
    return np.float32(0)


def loss_fn(params, batch):
    # A step takes its time between pull and push, as a real one does; sleeping in the data would not make it stale.
    rest = jax.pure_callback(nap, jax.ShapeDtypeStruct((), jnp.float32), batch["seconds"])
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2) + rest


def durations_of(name, step):
    """The seconds that a step of each worker takes: numbers, or functions from a random generator."""
    if name == "stalls":
        stalled = so.parameter_server.durations.with_stalls(step, probability=0.1, seconds=9 * step)
        return [stalled] * WORKERS
    return [step] * (WORKERS - 1) + [SLOWER * step]


def closed_form(name, s):
    """Pushes per second over those of s=0, where there is a formula for the long run.

    That for one slow worker is algorithms.md's; that for stalls is our own: the expected maximum of n steps over a mean one.
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
    """Run threads for so many seconds after everybody's first step; return rates and the loss after each push."""
    durations, end = durations_of(name, step), [np.inf]

    def batches_of(worker):
        draw, data = np.random.default_rng([0, worker]), np.random.default_rng([1, worker])
        while time.perf_counter() < end[0]:
            took = durations[worker](draw) if callable(durations[worker]) else durations[worker]
            x = data.normal(size=(ROWS, DIM)).astype(np.float32)
            y = x @ TRUTH + data.normal(size=ROWS).astype(np.float32)
            yield {"x": x, "y": y, "seconds": np.full(ROWS, took, np.float32)}

    rate = 0.02 if s == 0 else 0.02 / WORKERS  # a clock is one step with the mean of four gradients
    opt = so.async_sgd(optax.sgd(rate), loss_fn, workers=WORKERS, max_staleness=s)
    params = {"w": np.zeros(DIM, np.float32)}
    opt.run(params, batches_of, num_updates=1)  # compiles
    end[0] = time.perf_counter() + seconds
    metrics = opt.run(params, batches_of, num_updates=10**9).metrics
    return {
        "pushes_per_second": metrics["pushes_per_second"],
        "losses": metrics["history"]["loss"],
        "largest_staleness": max(metrics["staleness"]),
        "wait_share": sum(metrics["wait_seconds"].values()) / (WORKERS * metrics["seconds"]),
    }


def simulate(name, s, step, seconds):
    """The same durations in virtual time: the mean of twenty runs, because stalls are rare."""
    workers = [so.parameter_server.SimulatedWorker(one) for one in durations_of(name, step)]
    runs = [so.parameter_server.simulate(workers, max_staleness=s, until=seconds, seed=seed) for seed in range(20)]
    return float(np.mean([run.metrics["pushes_per_second"] for run in runs]))


def tail(losses, count):
    """The mean of the last tenth of so many losses: single ones are noisy."""
    used = losses[:count]
    return float(np.mean(used[-max(1, len(used) // 10) :])) if len(used) else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--step-ms", type=float, default=40.0)
    options = parser.parse_args()
    step, results = options.step_ms / 1e3, {}
    print(f"{WORKERS} workers, steps of {options.step_ms:g} ms, {options.seconds:g} s each; ratios to max_staleness=0")
    for name in ("stalls", "one slower"):
        print(f"\n{name:12} pushes/s   measured  simulated  formula   loss at equal time, equal gradients   waits")
        rows = {str(s): measure(name, s, step, options.seconds) for s in BOUNDS}
        base, virtual = rows["0"], simulate(name, 0, step, options.seconds)
        gradients = len(base["losses"]) * WORKERS
        for s in BOUNDS:
            row = rows[str(s)]
            losses = row.pop("losses") if s != 0 else row["losses"]
            row["ratio"] = row["pushes_per_second"] / base["pushes_per_second"]
            row["simulated_ratio"] = simulate(name, s, step, options.seconds) / virtual
            row["formula_ratio"] = closed_form(name, s)
            row["loss_at_equal_time"] = tail(losses, len(losses))
            row["loss_at_equal_gradients"] = tail(losses, gradients if s != 0 else len(losses))
            formula = "       -" if row["formula_ratio"] is None else f"{row['formula_ratio']:8.2f}"
            print(
                f"s={s!s:10} {row['pushes_per_second']:8.1f}   {row['ratio']:8.2f}   {row['simulated_ratio']:8.2f} {formula}"
                f"   {row['loss_at_equal_time']:12.3f} {row['loss_at_equal_gradients']:14.3f} {row['wait_share']:16.0%}"
            )
        base.pop("losses")
        results[name] = rows
    print("\nwrote", write_json(__file__, {"step_ms": options.step_ms, "seconds": options.seconds, "runs": results}))


if __name__ == "__main__":
    main()
