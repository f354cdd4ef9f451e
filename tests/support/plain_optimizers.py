"""SOAP of one matrix, written plainly in numpy float64 after its paper."""

import numpy as np


def adam_step(m, v, t, b1, b2, eps):
    return m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)


def soap(grads, *, b1, b2, eps, ridge, interval, first=10):
    """Yield the values to subtract, for a learning rate of 1."""
    m = v = left_factor = right = 0
    p, q = (np.eye(n) for n in grads[0].shape)
    for t, g in enumerate(grads):
        if t:
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * (p.T @ g @ q) ** 2
            turned = p.T @ m @ q
            yield p @ adam_step(turned, v, t, b1, b2, eps) @ q.T
        else:
            yield np.zeros_like(g)
        left_factor = b2 * left_factor + (1 - b2) * g @ g.T
        right = b2 * right + (1 - b2) * g.T @ g
        for _ in range(first if t == 0 else t % interval == 0):
            p, q = (
                np.linalg.qr(x @ y + ridge * np.trace(x) / len(x) * y)[0]
                for x, y in ((left_factor, p), (right, q))
            )
