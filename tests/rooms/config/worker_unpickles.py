"""Another process: `python worker_unpickles.py NUM_DEVICES FILE RESULT` trains what FILE has for
three steps.
"""

import json
import sys
from pathlib import Path

import cloudpickle
import jax

jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
sent = cloudpickle.loads(Path(sys.argv[2]).read_bytes())
results = {}
for name, opt, params, batch in sent:
    state = opt.init(params)
    losses = []
    for _ in range(3):
        state, metrics = opt.step(state, batch)
        losses.append(float(metrics["loss"]))
    places = {str(leaf.sharding.mesh == opt.mesh) for leaf in jax.tree.leaves(state.params)}
    results[name] = [dict(opt.mesh.shape), losses, *places]
Path(sys.argv[3]).write_text(json.dumps(results))
