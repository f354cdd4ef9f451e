"""A run whose process 1 has a device that computes wrong from step 5 on: `python
worker_with_a_fault.py FOLDER`.

Without a launcher one process has all three devices. After a restart nobody uses the wrong device.
"""

import atexit
import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np
import optax
import pytest
from support import faults

import shardopt as so

DEVICES = 3
STEPS = 8

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 1 if "SHARDOPT_LAUNCHED" in os.environ else DEVICES)
    so.initialize()
    atexit.register(lambda: print("the handlers of atexit ran"))
    now = faults.hit_runs(pytest.MonkeyPatch())
    fault = faults.Fault(1, "gradient", "flip", index=9, bit=20, leaf=0)

    def batches():
        for step, batch in enumerate(itertools.islice(faults.batches(DEVICES), STEPS)):
            is_wrong = step >= 5 and "SHARDOPT_RESTART" not in os.environ
            now.update(fault=fault if is_wrong else None, stuck=True, runs=0)
            yield batch

    opt = so.ddp(optax.adam(0.01), so.make_mesh(), faults.loss, view="unproved")
    with so.Checkpoints(Path(sys.argv[1]) / "checkpoints", every=2, keep=None) as checkpoints:
        result = so.fit(
            opt,
            opt.init(faults.first_params()),
            so.GlobalRows(batches()),
            num_steps=STEPS,
            checkpoints=checkpoints,
            cross_check_every=1,
        )
    if jax.process_index() == 0:
        params = {
            name: np.asarray(leaf.addressable_data(0)) for name, leaf in result.state.params.items()
        }
        np.savez(Path(sys.argv[1]) / "params.npz", **params)
