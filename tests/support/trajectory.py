"""A transformation at work, to be run wherever its axis is bound."""

import jax
import optax


def trajectory(tx, params):
    """Return run(grads [steps, ...]) -> parameters after each step."""

    def run(grads):
        now = params
        seen = []
        state = tx.init(now)
        for t in range(len(jax.tree.leaves(grads)[0])):
            updates, state = tx.update(jax.tree.map(lambda g, t=t: g[t], grads), state, now)
            now = optax.apply_updates(now, updates)
            seen.append(now)
        return seen

    return run
