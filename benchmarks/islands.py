"""Ten thousand islands over the internet, in virtual time, on the server that real ones use: what
they do, and what stops them.

Run: python benchmarks/islands.py [--hours 8] [--islands 10000]

Islands push 150 million bf16 parameters (300 MB) after H local steps of 3.3 million tokens
together. Drawn for each: the seconds of its H steps (log-normal, mean 900, spread 0.7), its line
(log-normal, mean 12.5 MB/s, spread 0.8) and latency (20 to 150 ms); it is there for 4 hours and
away for 1, both exponential, and what it computes when it goes is lost. A server has a line of 1.25
GB/s, which pulls and pushes share: 0.48 s a round, and 1/n of that where n servers share the
parameters. Clocks, versions and log are those of `so.async_sgd`; only the mathematics is left out.

Closed forms, with R the seconds of a round (pull, H steps, push), mu and nu the mean times there
and away, and W the seconds that a push waits for the servers:
  pushes of an island a second  x = 1 / ((mu + nu) (exp((R + W) / mu) - 1)): rounds that end before it goes, by renewal
  the wait                      0, or where more come than n servers take: sum x exp(W / mu) = n / 0.48 s
  all of them                   X = sum x; those who go while their push waits cost servers time for nothing
  versions that a push is late  sum x (R + W), by Little's law
Claims: without a bound, of a thousand islands and more, both within 2%. A full server is the limit,
not the clock.
"""

import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import write_json

from shardopt.parameter_server import SimulatedWorker, simulate

TOKENS = 100 * 32768
MESSAGE_BYTES = 2 * 150e6
SERVER_SECONDS = 2 * MESSAGE_BYTES / 1.25e9
THERE = 4 * 3600.0
AWAY = 3600.0
SKIPPED = 3600.0
"""Seconds before anything is counted: at the start all rounds begin at once."""


class Found(NamedTuple):
    """A run, and what closed forms say of it."""

    islands: int
    servers: int
    max_staleness: int | None
    tokens_per_second: float
    expected_tokens_per_second: float
    delay: float
    expected_delay: float
    expected_wait: float
    lost: float
    staleness: int
    wall_seconds: float
    events: int


def lognormal(draw, mean, spread, size):
    variance = math.log1p(spread**2)
    return draw.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), size)


def periods(draw, end):
    """When an island is there: exponential, as if it had gone on for ever."""
    now = 0.0 if draw.random() < THERE / (THERE + AWAY) else draw.exponential(AWAY)
    found = []
    while now < end:
        until = now + draw.exponential(THERE)
        found.append((now, until))
        now = until + draw.exponential(AWAY)
    return tuple(found) or ((2 * end, 3 * end),)


def islands(count, end, seed=0):
    draw = np.random.default_rng(seed)
    seconds = lognormal(draw, 900, 0.7, count)
    bandwidth = lognormal(draw, 12.5e6, 0.8, count)
    latency = draw.uniform(0.02, 0.15, count)
    return [
        SimulatedWorker(float(s), float(lag), float(b), periods(draw, end))
        for s, b, lag in zip(seconds, bandwidth, latency, strict=True)
    ]


def closed_forms(workers, servers):
    """Pushes a second, versions late, seconds that a push waits for the servers."""
    rounds = np.array(
        [one.step_seconds + 2 * one.transfer_seconds(MESSAGE_BYTES) for one in workers]
    )

    def rates(wait):
        return 1 / ((THERE + AWAY) * np.expm1((rounds + wait) / THERE))

    def too_many(wait):
        return (rates(wait) * math.exp(wait / THERE)).sum() > servers / SERVER_SECONDS

    low = 0.0
    high = 10 * THERE
    while too_many(0.0) and high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if too_many(middle) else (low, middle)
    return rates(low).sum(), (rates(low) * (rounds + low)).sum(), low


def run(count, servers, hours, max_staleness=None):
    end = hours * 3600.0
    workers = islands(count, end)
    began = time.perf_counter()
    result = simulate(
        workers,
        max_staleness=max_staleness,
        until=end,
        message_bytes=MESSAGE_BYTES,
        server_seconds=SERVER_SECONDS / servers,
    )
    wall = time.perf_counter() - began
    events = result.log.columns()
    counted = (events["kind"] == 2) & (events["time"] > SKIPPED)  # pushes
    pushes = counted.sum()
    pulls = ((events["kind"] == 1) & (events["time"] > SKIPPED)).sum()
    expected, late, wait = closed_forms(workers, servers)
    return Found(
        count,
        servers,
        max_staleness,
        float(pushes / (end - SKIPPED) * TOKENS),
        float(expected * TOKENS),
        float(np.maximum(events["version"] - events["pulled"] - 1, 0)[counted].mean()),
        float(late),
        float(wait),
        float(1 - pushes / pulls),
        int(events["staleness"].max()),
        wall,
        len(result.log),
    )


def plot(found, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7.2), layout="constrained")
    free = [one for one in found if one.max_staleness is None]
    colors = {1: "#4269d0", 2: "#efb118", 4: "#ff725c", 8: "#3ca951"}
    for servers in sorted({one.servers for one in free}):
        rows = sorted(one for one in free if one.servers == servers)
        counts = [one.islands for one in rows]
        name = f"{servers} server{'s' * (servers > 1)}"
        look = {"color": colors[servers], "marker": "o", "markersize": 4, "linewidth": 0}
        line = {"color": colors[servers], "linewidth": 1}
        axes[0, 0].plot(counts, [one.tokens_per_second / 1e6 for one in rows], label=name, **look)
        axes[0, 0].plot(counts, [one.expected_tokens_per_second / 1e6 for one in rows], **line)
        axes[0, 1].plot(counts, [one.delay for one in rows], label=name, **look)
        axes[0, 1].plot(counts, [one.expected_delay for one in rows], **line)
        axes[1, 0].plot(
            counts, [100 * one.lost for one in rows], label=name, **{**look, "linewidth": 1}
        )
    most = max(one.islands for one in found)
    bounds = [one for one in found if one.max_staleness is not None]
    bounds += [one for one in free if one.islands == most and one.servers == max(colors)]
    names = ["none" if one.max_staleness is None else str(one.max_staleness) for one in bounds]
    axes[1, 1].bar(
        names, [one.tokens_per_second / 1e6 for one in bounds], color=colors[8], width=0.6
    )
    titles = [
        "million tokens a second (line: closed form)",
        "versions that a push is late (line: closed form)",
        "rounds begun and never pushed, %",
        f"million tokens a second of {most} islands by bound, {max(colors)} servers",
    ]
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.3)
    for axis in (axes[0, 0], axes[0, 1], axes[1, 0]):
        axis.set(xscale="log", xlabel="islands")
    for axis in (axes[0, 0], axes[0, 1]):
        axis.set_yscale("log")
    axes[1, 1].set_xlabel("max_staleness")
    axes[1, 0].set_ylim(bottom=0)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--islands", type=int, default=10_000)
    options = parser.parse_args()
    most = options.islands
    counts = sorted({most // 100, most // 30, most // 10, most // 3, most})
    ways = [(count, servers, None) for servers in (1, 2, 4, 8) for count in counts]
    ways += [(most, 8, bound) for bound in (0, 1, 4, 16)]
    found = []
    for count, servers, bound in ways:
        found.append(one := run(count, servers, options.hours, bound))
        ratio = one.tokens_per_second / one.expected_tokens_per_second
        print(
            f"{count:6} islands {servers} servers bound {bound!s:4} "
            f" {one.tokens_per_second / 1e6:7.3f} Mtokens/s ({ratio:.3f} of the closed form)  late"
            f" {one.delay:7.1f} (closed form {one.expected_delay:7.1f})  lost {one.lost:.1%} "
            f" {one.events} events in {one.wall_seconds:.1f} s",
            flush=True,
        )
    path = write_json(
        __file__, {"options": vars(options), "runs": [one._asdict() for one in found]}
    )
    plot(found, Path(path).with_suffix(".png"))
    print("wrote", path)


if __name__ == "__main__":
    main()
