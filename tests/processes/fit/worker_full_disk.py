"""Runs that meet a full disk at random places: `python worker_full_disk.py tmpfs|limit FOLDER
REPEATS`.

tmpfs: FOLDER is a small file system, which is filled until a part of a checkpoint's room is left.
limit: no file may grow beyond a part of a checkpoint's size. Prints a line of JSON a repeat."""

import json
import os
import random
import resource
import shutil
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so
from shardopt.training import jsonl
from shardopt.training._fit import fit

STEPS = 30
EVERY = 5
WIDTH = 40_000


def loss_fn(params, batch):
    return jnp.mean((batch * params["w"] - 1) ** 2) + jnp.sum(params["b"] ** 2)


opt = so.fsdp(optax.adam(0.01), so.make_mesh(), loss_fn, min_shard_elements=1)
params = {"w": np.ones(WIDTH, np.float32), "b": np.ones(3, np.float32)}


def fresh():
    return opt.init(params)


def batches(at=None, fill=None):
    for step in range(STEPS):
        if step == at:
            fill()
        yield np.random.default_rng(step).normal(size=(2, WIDTH)).astype(np.float32)


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def same(a, b):
    return all(
        np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def meet(how, disk, rng, unbroken):
    """Fill the disk at a random step, after the first checkpoints, so that a random part of the
    next one fits.
    """
    run = disk / "run"
    ballast = disk / "ballast"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    free = []
    part = rng.random()

    def fill():
        checkpoints.wait()
        if how == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(part * 4 * WIDTH), limits[1]))
            return
        room = shutil.disk_usage(disk).free - int(part * size_of(run / str(checkpoints.latest())))
        with ballast.open("wb") as file:
            file.write(bytes(max(0, room)))
        free.append(shutil.disk_usage(disk).free)

    checkpoints = so.Checkpoints(run, every=EVERY, keep=2)
    at = rng.randrange(EVERY + 1, STEPS - 1)
    try:
        with checkpoints:
            log = jsonl(run / "metrics.jsonl")
            fit(
                opt,
                fresh(),
                batches(at, fill),
                num_steps=STEPS,
                checkpoints=checkpoints,
                log=log,
                progress=False,
            )
        error = None
    except (so.errors.CheckpointError, OSError) as caught:
        error = caught
    free_after = [shutil.disk_usage(disk).free] if free else []
    whole_steps = checkpoints.steps()
    unfinished = [
        path.name for path in run.iterdir() if path.name.startswith(".") and path.name != ".lock"
    ]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ballast.unlink(missing_ok=True)

    newest = so.restore(run, opt)  # every byte of it is compared with its SHA-256
    with so.Checkpoints(run, every=EVERY, keep=2) as checkpoints:
        log = jsonl(run / "metrics.jsonl")
        completed_run = fit(
            opt,
            fresh(),
            batches(),
            num_steps=STEPS,
            checkpoints=checkpoints,
            log=log,
            progress=False,
        )
    return {
        "at": at,
        "error": error and f"{type(error).__name__}: {error}",
        "whole": whole_steps,
        "restored": int(newest.step),
        "unfinished": unfinished,
        "gave_back": [before - after for before, after in zip(free, free_after, strict=True)],
        "completed": completed_run.step,
        "same": same(completed_run.state, unbroken.state),
        "names": sorted(path.name for path in run.iterdir()),
        "logged": [
            json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()
        ],
    }


def main(how, folder, repeats):
    unbroken = fit(opt, fresh(), batches(), num_steps=STEPS, progress=False)
    for draw in range(int(repeats)):
        print(json.dumps(meet(how, Path(folder), random.Random(draw), unbroken)), flush=True)
        shutil.rmtree(Path(folder) / "run")


if __name__ == "__main__":
    main(*sys.argv[1:])
