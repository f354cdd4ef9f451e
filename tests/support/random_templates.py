"""What random losses are made of: expressions by family.

The placeholders are explained in `random_losses`.
"""

ROWWISE = {
    "elementwise": [
        "jnp.tanh({r})", "jnp.sin({r})", "jnp.cos({r})", "jnp.arctan({r})", "jnp.abs({r})", "jnp.sign({r}) * {r}", "jnp.square({r})",
        "jnp.sqrt(1 + {r} ** 2)", "jnp.exp(-{r} ** 2)", "jnp.log1p({r} ** 2)", "jnp.expm1(jnp.tanh({r}))", "jnp.clip({r}, -1, 1)",
        "jnp.floor({r}) + {r}", "jnp.round({r}, 1) * {r}", "jnp.tanh({r}) ** 3", "jax.scipy.special.erf({r})", "1 / (2 + {r} ** 2)",
        "jax.lax.rsqrt(1 + {r} ** 2)", "-{r}", "{c} * {r}", "{r} + {c}", "{c} - {r}", "jnp.minimum({r}, {c})", "jnp.maximum({r}, {c})",
        "jnp.where({r} > 0, {r}, {c} * {r})", "jnp.logaddexp({r}, {c})", "jnp.arctan2({r}, 2.0)", "{r} % 1.5", "(1 + {r} ** 2) ** 0.3",
        "jnp.where(jnp.isfinite({r}), {r}, 0.0)", "jax.lax.stop_gradient({r}) + {r}", "jnp.nan_to_num({r})", "jnp.full_like({r}, {c}) * {r}",
        "jnp.zeros_like({r}) + jnp.sin({r})", "jnp.select([{r} > 1, {r} > 0], [{r}, 2 * {r}], 0.5 * {r})", "2.0 ** jnp.tanh({r})",
        "({r} > {c}) * {r}", "jnp.hypot({r}, 1.0)", "jnp.cosh(jnp.tanh({r}))", "jnp.abs({r} + 1j).real", "jnp.heaviside({r}, 0.5) * {r}",
    ],
    "activations": [
        "jax.nn.relu({r})", "jax.nn.gelu({r})", "jax.nn.silu({r})", "jax.nn.sigmoid({r})", "jax.nn.softplus({r})", "jax.nn.elu({r})",
        "jax.nn.leaky_relu({r})", "jax.nn.selu({r})", "jax.nn.log_sigmoid({r})", "jax.nn.hard_tanh({r})", "jax.nn.relu6({r})",
        "jax.nn.celu({r})", "jax.nn.softmax({r}, -1)", "jax.nn.log_softmax({r2})", "layer_norm({r2})", "jitted_norm({r2})",
        "jax.nn.standardize({r3}, -1, epsilon=0.1)", "jax.nn.glu({r2}.repeat(2, 1))", "jax.nn.logsumexp({r2}, -1, keepdims=True) * {r2}",
    ],
    "pairs": [
        "{r} + {s}", "{r} * {s}", "{r} - {s}", "{r} / (1 + {s} ** 2)", "jnp.maximum({r}, {s})", "jnp.where({r} > {s}, {r}, {s})",
        "jnp.arctan2({r}, 1 + {s} ** 2)", "jnp.logaddexp({r}, {s})", "{r} * {q}", "{r} + {q}", "jnp.where({q} > 0, {r}, {c})",
        "({r} - {s}) ** 2", "optax.huber_loss({r}, {s})", "jnp.sum({r2} * {s}, -1)", "jnp.einsum('bi,bi->b', {r2}, {s})",
        "jnp.einsum('bi,bj->bij', {r2}, {s})", "jnp.einsum('bti,bsi->bts', {r3}, {s})", "jax.vmap(jnp.dot)({r2}, {s})",
        "jax.vmap(jnp.outer)({r2}, {s}).sum(-1)", "jax.lax.dot_general({r2}, {s}, (((1,), (1,)), ((0,), (0,))))", "{r3} @ {s}.swapaxes(1, 2)",
        "jnp.concatenate([{r2}, {s}], -1)", "jnp.stack([{r}, {s}], -1)", "jnp.stack([{r}, {s}], 1)", "jnp.cross({r2}[:, :2], {s}[:, :2])",
        "jnp.matmul({r3}, {s}[:, 0, :, None])[..., 0]", "optax.cosine_similarity(1 + {r2}, 3 + {s} ** 2)", "optax.softmax_cross_entropy({r2}, jax.nn.softmax({s}))",
    ],
    "parameters": [
        "{r2} @ {w}", "{r3} @ {w}", "{r2} + {v}", "{r2} * {v}", "{r2} * {v} + {v}", "jnp.einsum('bi,ij->bj', {r2}, {w})",
        "jnp.einsum('ij,bi->jb', {w}, {r2}).T", "jnp.einsum('bti,ij->btj', {r3}, {w})", "({w}.T @ {r2}.T).T", "jnp.dot({r2}, {v})",
        "jnp.tensordot({r3}, {w}, ([2], [0]))", "jax.vmap(lambda a: a @ {w})({r2})", "jnp.tanh({r2} @ {w}).sum(-1)",
        "{r2} @ jax.lax.stop_gradient({w})", "{r1} * params['v'][0]", "{r1} * jnp.sum(params['w'] ** 2)", "{r2} / jnp.linalg.norm({w})",
        "jnp.where({r2} > {v}, {r2}, {v})", "jnp.outer({r1}, params['v'][:3])", "jnp.kron({r2}, params['v'][None, :2])",
        "{r2} @ jnp.linalg.inv(jnp.eye({F}) + 0.1 * params['w'][:{F}, :{F}] @ params['w'][:{F}, :{F}].T)", "{r2} - params['w'].mean()",
        "{r3} + params['pos'][:{r3}.shape[1], :{F}]", "{r2} * TABLE[0, :{F}]", "{r2} @ TABLE[:{F}, :3]",
    ],
    "features": [
        "{r2}.sum(-1)", "{r3}.mean(1)", "{r3}.max((1, 2))", "{r2}.min(-1)", "jnp.prod({r2}, -1)", "jax.nn.logsumexp({r2}, -1)", "{r2}.std(-1)",
        "{r3}.var(1)", "jnp.linalg.norm(1 + {r2}, axis=-1)", "jnp.median({r2}, -1)", "({r2} > 0).any(-1) * {r2}[:, 0]", "jnp.all({r2} > -1, -1) + {r2}[:, 0]",
        "{r2} - {r2}.mean(-1, keepdims=True)", "jnp.cumsum({r2}, -1)", "jnp.cumprod({r2}, 1)", "jnp.sort({r2}, -1)", "jnp.sort({r3}, 1)",
        "jnp.argsort({r2}, -1) * {r2}", "jnp.flip({r2}, -1)", "jnp.roll({r2}, 1, -1)", "jax.lax.top_k({r2}, 2)[0]", "jnp.diff({r2}, axis=-1)",
        "jax.lax.cummax({r3}, 1)", "jnp.argmax({r2}, -1) * {r2}[:, 0]", "jnp.quantile({r2}, 0.3, axis=-1)", "jax.lax.reduce({r2}, 0.0, jax.lax.add, (1,))",
        "jnp.trapezoid({r2}, axis=-1)", "jnp.ptp({r2}, -1)", "jnp.sum({r2} * (jnp.arange({F}) > 0), -1)",
    ],
    "shapes": [
        "{r2}.reshape(B, {F}, 1).sum(-1)", "{r3}.reshape(B, -1)", "{r3}.reshape(-1, {F}).sum(-1).reshape(B, -1)", "{r3}.swapaxes(1, 2)", "{r2}.T[{j}]",
        "{r3}.transpose(1, 0, 2)[0]", "({r2}.T * {v}[:, None]).T", "jnp.repeat({r2}, 2, -1)", "jnp.tile({r2}, (1, 2))", "jnp.broadcast_to({r2}[:, None], (B, 2, {F}))",
        "jnp.pad({r2}, ((0, 0), (1, 0)))", "jnp.pad({r1}[:, None], ((0, 0), (0, 2)), constant_values=1.0)", "jnp.concatenate([{r2}, jnp.ones((B, 1))], 1)",
        "jnp.concatenate([jnp.tile(params['v'][:{F}], (B, 1, 1)), {r3}], 1)", "jnp.concatenate([jnp.broadcast_to({v}, (B, 1, {F})), {r3}], 1)",
        "{r2}[:, 1:]", "{r2}[:, :-1]", "{r2}[:, ::2]", "{r2}[:, ::-1]", "{r2}[..., {j}]", "{r3}[:, -1]", "{r3}[:, 0, :]", "{r2}[:B]", "{r}[:]", "{r1}[:, None]",
        "jnp.split({r2}, {F}, 1)[0]", "jnp.split(jnp.concatenate([{r}, 2 * {s}]), 2)[1]", "jnp.concatenate([{r}, {s}])[B:]", "jnp.stack([{r}, {s}])[0]",
        "jnp.squeeze({r1}[:, None], 1)", "jnp.moveaxis({r3}, 0, -1)[0].T", "jax.lax.rev({r2}, (1,))", "jnp.expand_dims({r}, 1)", "{r2}.ravel().reshape(B, {F})",
        "jax.lax.dynamic_slice({r2}, (0, 1), (B, {F} - 1))", "jax.lax.dynamic_update_slice({r2}, {r2}[:, :1] * 2, (0, {j}))", "jax.lax.slice_in_dim({r2}, 0, {F} - 1, axis=1)",
        "jnp.tril({r3})", "jnp.triu({r3}, 1)", "jnp.diagonal({r3}, axis1=1, axis2=2)", "jnp.zeros((B{rest})) + {r}", "jnp.repeat({r1}[:, None], 2, axis=1)",
    ],
    "lookups": [
        "{r2}[jnp.arange(B), label % {F}]", "jnp.take_along_axis({r2}, label[:, None] % {F}, 1)", "params['table'][{i}]", "params['table'][{i}, {n} % 4]",
        "jnp.take(params['table'], {i}, axis=0)", "TABLE[{i}]", "jax.nn.one_hot(label, 3) @ params['w'][:3]", "{r2} * jax.nn.one_hot(label % {F}, {F})",
        "jax.vmap(lambda a, i: a[i])({r2}, label % {F})", "{r2}.at[:, {j}].set(0.0)", "{r2}.at[:, {j}].add({r2}[:, 0])", "{r2}.at[jnp.arange(B), label % {F}].set(1.0)",
        "{r2}.at[jnp.arange(B), label % {F}].add(2.0)", "{r2}[:, jnp.array([0, 1])]", "{r2}[:, label[:1] * 0]",
        "jax.vmap(lambda a, i: a.at[i].multiply(2))({r2}, label % {F})", "jnp.zeros_like({r2}).at[:, {j}].set({r2}[:, 0])", "{r3}[jnp.arange(B), label % {r3}.shape[1]]",
        "jax.vmap(lambda a, i: jax.lax.dynamic_slice_in_dim(a, i, 1))({r2}, label % 2)", "jax.vmap(lambda a, i: jax.lax.dynamic_index_in_dim(a, i, 0, False))({r2}, label % {F})",
        "optax.softmax_cross_entropy_with_integer_labels({r2}, label % {F})", "params['v'][label]", "jnp.where(label == 1, params['v'][0], {r1})",
        "{r2} * (label[:, None] == jnp.arange({F}))", "jnp.choose(label % 2, [{r1}, 2 * {r1}])", "jax.vmap(lambda a, i: jax.ops.segment_sum(a, jnp.full({F}, i), 3))({r2}, label)",
    ],
    "control": [
        "jax.vmap(lambda a: jnp.tanh(a) * a.sum())({r})", "jax.vmap(lambda a: jax.lax.cond(a.sum() > 0, jnp.sin, jnp.cos, a))({r})", "jax.lax.map(lambda a: jnp.sin(a) + a.mean(), {r})",
        "jax.lax.map(lambda a: jnp.tanh(a), {r}, batch_size=2)", "jax.lax.scan(lambda c, a: (c, jnp.tanh(a)), 0.0, {r})[1]", "jax.checkpoint(lambda a: jnp.sin(a) ** 2)({r})",
        "jax.jit(lambda a: jnp.cos(a) * 2)({r})", "halves_gradient({r})", "gradient_by_value({r})", "slope_of_its_own({r})", "jax.lax.fori_loop(0, 3, lambda i, a: jnp.sin(a) + i, {r})",
        "jax.lax.scan(lambda c, a: (jnp.tanh(c + a),) * 2, jnp.zeros((B, {F})), {r3}.swapaxes(0, 1))[0]", "jax.lax.scan(lambda c, a: (0.5 * c + a, c), jnp.zeros((B, {F})), {r3}.swapaxes(0, 1))[1].swapaxes(0, 1)",
        "jax.lax.scan(lambda c, a: (0.5 * c + a, c), jnp.zeros(B), {r2}.T)[1].T", "jax.lax.scan(lambda c, i: (c + {r2}[:, i], None), jnp.zeros(B), jnp.arange({F}))[0]",
        "jax.lax.fori_loop(0, {F}, lambda i, out: out.at[:, i].set(jnp.sin({r2}[:, i])), jnp.zeros((B, {F})))", "functools.reduce(lambda out, i: out.at[:, i].set({r2}[:, i] * i), range({F}), jnp.zeros((B, {F})))",
        "jax.vmap(lambda a: jax.lax.while_loop(lambda s: (jnp.abs(s) > 0.5).any(), lambda s: s * 0.5, a))(jax.lax.stop_gradient({r}))", "jax.vmap(jax.grad(lambda a: jnp.sum(jnp.sin(a) * a)))({r})",
        "jax.grad(lambda a: jnp.sum(jnp.tanh(a) ** 2))({r})", "jax.vmap(jnp.sort)({r2})", "jax.vmap(lambda a: jax.lax.scan(lambda c, e: (c * 0.5 + e, c), 0.0, a)[1])({r2})",
        "jax.vmap(lambda a, b: a @ b, in_axes=(0, None))({r2}, {v})", "jax.vmap(lambda a: a * 2, in_axes=1, out_axes=1)({r2})", "jax.lax.cond(params['v'][0] > 0, jnp.sin, jnp.cos, {r})",
        "jax.lax.switch(2, [jnp.sin, jnp.cos, jnp.tanh], {r})", "jax.vmap(lambda a: jax.lax.associative_scan(jnp.add, a))({r2})", "jax.checkpoint(jax.vmap(lambda a: a / (1 + a @ a)))({r2})",
        "jax.jvp(jnp.sin, ({r},), ({r} * 0.5,))[1]", "jax.lax.fori_loop(0, 2, lambda i, a: jax.lax.cond(i > 0, jnp.sin, jnp.cos, a), {r})", "jnp.vectorize(lambda a: a.max(), signature='(n)->()')({r2})",
    ],
    "turns": [
        "jax.vmap(lambda a, k: jax.lax.fori_loop(0, k, lambda i, s: s * 0.5 + i, a))(jax.lax.stop_gradient({r}), label)", "jax.lax.scan(jax.checkpoint(lambda c, a: (c, jnp.tanh(a))), 0.0, {r})[1]",
        "jax.vmap(lambda a: jax.lax.while_loop(lambda s: jnp.sum(s ** 2) > 0.3, lambda s: s * 0.5, a))(jax.lax.stop_gradient({r}))",
    ],
    "integers": [
        "{r1} * (label.astype(jnp.int8) * jnp.int8(100))", "{r1} * (label * label - 3)", "{r1} * (label.astype(jnp.uint8) - jnp.uint8(1))", "{r1} * jnp.sum(jax.nn.one_hot(label, 3, dtype=jnp.int8) * jnp.int8(90), -1)",
        "{r1} * (label << 2)", "{r1} * (-label.astype(jnp.uint32) % 1000)", "{r1} * (label // 2)",
    ],
    "draws": [
        "{r} * jax.random.uniform(jax.random.key(1))", "jax.vmap(lambda a, k: a * jax.random.uniform(jax.random.fold_in(jax.random.key(1), k)))({r}, label)", "{r2} * jax.random.bernoulli(jax.random.key(2), 0.5, ({F},))",
        "jax.vmap(lambda a, k: a + jax.random.normal(jax.random.key(k), a.shape))({r}, label)",
    ],
    "windows": [
        "jax.lax.conv_general_dilated({r3}, params['table'].reshape(3, 4, 4)[:, :{F}], (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))",
        "jax.lax.conv_general_dilated({r2}[:, None], params['v'].reshape(4, 1, 3)[:, :, :2], (1,), 'SAME', dimension_numbers=('NCW', 'OIW', 'NCW'))",
        "jax.lax.reduce_window({r3}, 0.0, jax.lax.add, (1, 2, 1), (1, 1, 1), 'VALID')", "jax.lax.reduce_window({r3}, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), 'SAME')",
        "jax.lax.reduce_window({r3}, 0.0, jax.lax.add, (1, 2, 1), (1, 1, 1), 'SAME') / 2", "jax.vmap(lambda a: jnp.convolve(a, params['v'][:2], mode='same'))({r2})",
    ],
}  # fmt: skip
"""Each row of the result follows from the same row of what goes in."""

MEANS = {
    "means": [
        "jnp.mean({r})", "{r}.sum() / B", "jnp.mean({r1})", "jax.lax.scan(lambda c, a: (c + a.mean(), None), 0.0, {r})[0] / B", "jnp.einsum('b->', {r1}) / B",
        "jnp.sum({r2} * {s}) / B", "jnp.dot({r1}, {s}) / B", "jnp.ones(B) @ {r1} / B", "jnp.trace({r2}.T @ {s}) / B", "jax.lax.fori_loop(0, B, lambda i, c: c + {r1}[i], 0.0) / B",
        "jnp.zeros(3).at[label].add({r1})[1] / B", "jax.ops.segment_sum({r1}, label, 3)[0] / B", "jnp.mean({r}[::-1])", "jnp.sum(jnp.sum({r2}, 0) / B)", "jnp.cumsum({r1})[-1] / B",
        "jax.lax.scan(jax.checkpoint(lambda c, a: (c + a.mean(), None)), 0.0, {r})[0] / B", "jax.lax.scan(jax.jit(lambda c, a: (c + jnp.tanh(a).mean(), None)), 0.0, {r})[0] / B",
        "jnp.mean(jnp.roll({r}, 1, 0))", "jnp.mean(jnp.sort({r1}))", "jnp.vdot({r}, {s}) / {r}.size", "jnp.mean(jnp.concatenate([{r}, {s}]))", "functools.reduce(jnp.add, [{r1}[i] for i in range(B)]) / B",
    ],
}  # fmt: skip
"""Means over rows that are scalars."""

MIXING = {
    "statistics": [
        "{r} - {r}.mean(0)", "{r} / (1 + jnp.abs({r}).sum(0))", "({r} - {r}.mean(0)) / jnp.sqrt({r}.var(0) + 1)", "jnp.cumsum({r}, 0)", "jnp.sort({r}, 0)", "jax.nn.softmax({r}, 0)",
        "jax.lax.associative_scan(jnp.add, {r})", "{r}.max(0)", "{r}.min(0)", "jnp.prod({r}, 0)", "jax.nn.logsumexp({r}, 0)", "jnp.median({r}, 0)", "{r}.sum(0)", "{r}.mean(0)", "{r}.sum(0) * jnp.ones((B{rest}))",
        "{r} * {r}.sum(0)", "{r} + {r}.mean(0)", "{r} + {r}.sum(0)", "{r} * B", "{r} / B", "jnp.abs({r}) ** (1 + 1 / B)", "{r} ** min(B, 3)", "{r}.mean(0, keepdims=True) ** 2", "jnp.sqrt(1 + {r}.mean(0) ** 2)", "jnp.linalg.norm({r2}, axis=0)",
        "{r}.std(0)", "jnp.argsort({r}, 0) * {r}", "jnp.argmax({r}, 0) * {r}", "jnp.where({r} > {r}.mean(0), {r}, 0.0)", "jnp.where({r} == {r}.max(0), {r}, 0.0)", "{r} * ({r}.sum() > 0)", "{r1}.sum() ** 2 / B", "{r1}.sum() ** 2 / B ** 2", "jnp.sum({r1}) * jnp.sum({q}) / B ** 2",
        "jnp.cumsum({r}, 0)[-1]", "jax.lax.cummax({r}, 0)", "jnp.cumprod({r}, 0)", "jnp.flip(jnp.cumsum({r}, 0), 0)", "jnp.diff({r}, axis=0)", "jnp.histogram({r1}, bins=3, weights={r1})[0]", "jax.lax.top_k({r1}, 2)[0]", "jnp.quantile({r}, 0.5, axis=0)", "jnp.unique({r1}, size=2)",
    ],
    "scales": [
        "{r} * {m}", "{r} + {m}", "{r} - {m}", "{r} / (2 + jnp.tanh({m}))", "jnp.where({m} > 0, {r}, {s})", "jnp.tanh({r} + {m})", "{m} ** 2", "jnp.tanh({m})", "{m} * {m}", "{m} * jnp.mean({r})", "{r} * {m} ** 2", "jnp.broadcast_to({m}, (B,))", "{m} * jnp.ones(B)", "{m} * B", "{m} / B", "{m} * jnp.sum({r})",
    ],
    "orders": [
        "{r}[::-1]", "jnp.roll({r}, 1, 0)", "{r} * {r}[::-1]", "{r} * {s}[::-1]", "{r}[jnp.argsort(mask)]", "{r}[jnp.argsort(jnp.sum({r}.reshape(B, -1), 1))]", "{r}[jnp.arange(B)[::-1]]", "{r}[jnp.arange(B)]", "{r}[jnp.arange(B) % 2]", "{r}[jnp.arange(B) // 2]", "{r}[label]", "jnp.take({r}, label, axis=0)",
        "{r}[jnp.array([0, 1])]", "{r}[B - 1 - jnp.arange(B)]", "jnp.concatenate([{r}[1:], {r}[:1]])", "{r} * jnp.roll({s}, 1, 0)", "jnp.roll({r}, B // 2, 0)", "{r}[(jnp.arange(B) + 1) % B]", "{r}[jnp.argsort(label)] * {r}", "{r}.at[jnp.arange(B)].set({s})", "{r}.at[label].add({s})", "{r}.at[0].set(0.0)", "{r}.at[0].add(1.0)",
        "{r}.at[-1].multiply(2.0)", "{r}.at[:2].set({r}[2:3])", "{r}.at[jnp.arange(B)[::-1]].set({s})", "{r}.at[::2].set(0.0)", "{r}.at[jnp.arange(B) // 2].add({s})", "jnp.zeros((3{rest})).at[label].add({r})", "jnp.zeros((3{rest})).at[label].set({r})", "jnp.zeros((3{rest})).at[label].max({r})", "jnp.zeros((B{rest})).at[jnp.arange(B)].set({r})",
        "jnp.zeros(4).at[0].set({r}.sum())", "jnp.zeros(B).at[0].set({r}.sum())", "jnp.zeros((B{rest})).at[0].set({r}.sum(0))", "jnp.zeros((B{rest})).at[B - 1].add({r}.mean(0))", "jnp.pad({r1}.sum()[None], (0, B - 1))", "jax.lax.dynamic_update_slice({r}, {r}[:1], ({n},) + (0,) * ({r}.ndim - 1))", "jax.lax.dynamic_update_slice_in_dim({r}, {s}, 0, 0)",
        "params['v'][label[0]] * {r}", "{r} * {q}[0]", "{r} - {r}[:1]", "{r} * {r}[-1:]", "{r}[jnp.minimum(jnp.arange(B), 3)]", "{r1}[jnp.argmax({r1})]", "{r}[jnp.sum(label) % B]", "jnp.take_along_axis({r2}, (label % B)[:, None], 0)", "jnp.take_along_axis({r2}, jnp.argsort({r2}, 0), 0)",
    ],
    "slices": [
        "{r}[:4]", "{r}[:B // 2]", "{r}[B // 2:]", "{r}[1:]", "{r}[:-1]", "{r}[::2]", "{r}[1::2]", "{r}[0]", "{r}[-1]", "{r}[B - 1]", "{r}[B // 2]", "{r}[{n}]", "{r}[:{n}]", "{r}[-{n}:]", "{r}[:8]", "{r}[:6]", "{r}[1:] - {r}[:-1]", "{r}[1:] * {r}[:-1]", "{r}[:B // 2] + {r}[B // 2:]", "{r}[:B // 2] * {r}[B // 2:]", "{r}[::2] - {r}[1::2]",
        "jax.lax.dynamic_slice_in_dim({r}, B // 2, 1)", "jax.lax.dynamic_slice_in_dim({r}, 0, B)", "jax.lax.dynamic_slice_in_dim({r}, B - 2, 2)", "jax.lax.dynamic_slice_in_dim({r}, {n}, 2)", "jax.lax.dynamic_index_in_dim({r}, B - 1, 0)", "jnp.split({r}, 2)[0]", "jnp.split({r}, 2)[0] - jnp.split({r}, 2)[1]", "jnp.pad({r1}, (0, 4))", "jnp.pad({r1}, (0, 12 - B))", "jnp.pad({r}, ((1, 0),) + ((0, 0),) * ({r}.ndim - 1))[:-1]",
        "jnp.pad({r1}, (0, B))", "jnp.pad({r1}, (1, 1), mode='edge')[1:-1]", "jnp.concatenate([{r}, {r}[:1]])", "jnp.concatenate([{r}, jnp.ones((1{rest}))])", "jnp.concatenate([{r}, jnp.ones((B{rest}))])", "jnp.concatenate([{r}, {s}])[:B + 1]", "jnp.concatenate([{r}, {s}])[::2]", "jnp.concatenate([{r}, {s}])[B // 2:-B // 2]", "jnp.stack([{r}, {s}]).reshape(-1{rest})[::2]", "jnp.stack([{r}, {s}], 1).reshape(-1{rest})[::2]",
    ],
    "merged": [
        "{r2}.T.reshape(B, {F})", "{r2}.reshape({F}, B).T", "{r2}.reshape({F}, B)[0]", "{r2}.reshape(-1)[:B]", "{r2}.reshape(2, -1).mean(1)", "{r2}.reshape(2, -1).prod(1)", "{r1}.reshape(-1, 2).prod(1)", "{r1}.reshape(-1, 2).max(1)", "{r1}.reshape(2, -1).max(0)", "{r1}.reshape(2, -1).max(1)", "{r2}.reshape(-1, 2 * {F}).max(1)", "{r3}.reshape(-1, {F}).max(0)", "{r3}.reshape(-1, {F})",
        "{r2}.reshape(-1)", "jnp.cumsum({r2}.reshape(-1))", "{r3}.reshape(-1, {F})[::2]", "{r3}.reshape(-1, {F})[:B]", "{r3}.reshape(-1, {F})[jnp.arange(B)]", "{r2}.reshape(-1)[jnp.arange(B) * {F} + {j}]", "{r2}.reshape(-1)[jnp.arange(B) * {F} + label % {F}]", "{r2}.reshape(-1)[jnp.arange(B)]", "jnp.sort({r2}.reshape(-1))[::{F}]", "{r3}.transpose(1, 0, 2).reshape(B, -1)", "{r3}.transpose(1, 0, 2).reshape(-1, {F})",
        "jnp.repeat({r}, 2, 0)", "jnp.repeat({r1}, 2)[:B]", "jnp.tile({r1}, 2)[:B]", "jnp.tile({r1}, 2)[::2]", "jnp.repeat({r1}, 2)[::2]", "jnp.tile({r1}, 2).reshape(2, B)[1]", "jnp.tile({r1}, 2).reshape(B, 2)", "jnp.repeat({r1}, 2).reshape(B, 2)", "jnp.resize({r1}, (B, 2))", "jnp.broadcast_to({r1}, (B, B))", "jnp.broadcast_to({r1}, (3, B)).sum(0)", "jnp.broadcast_to({r1}, (B, B)).T", "jnp.outer({r1}, {s})", "{r2} @ {s}.T", "{r2}.T @ {s}", "({r2}.T @ {s}) / B",
        "jnp.diagonal({r2} @ {s}.T)", "jax.nn.softmax({r2} @ {s}.T) @ {r2}", "jnp.einsum('bi,ci->b', {r2}, {s})", "jnp.einsum('bi,cj->ij', {r2}, {s}) / B ** 2", "jnp.einsum('bti,bsi->ts', {r3}, {s}) / B", "jnp.einsum('bti,cti->bc', {r3}, {s}) * jnp.eye(B)", "{r1}[:, None] - {r1}[None]", "jnp.eye(B) @ {r2}", "jnp.tril(jnp.ones((B, B))) @ {r2} / B", "jnp.ones((B, B)) @ {r2} / B", "jnp.roll(jnp.eye(B), 1, 0) @ {r2}",
        "jnp.linalg.det(jnp.eye({F}) + {r2}.T @ {s} / B)", "jnp.kron(jnp.eye(B), jnp.ones((2, 1))) @ {r1}", "jnp.convolve({r1}, params['v'][:3], mode='same')", "jax.lax.reduce_window({r1}, 0.0, jax.lax.add, (2,), (1,), 'SAME')", "jax.lax.reduce_window({r1}, -jnp.inf, jax.lax.max, (2,), (2,), 'VALID')", "jax.lax.reduce_window({r1}, 0.0, jax.lax.add, (1,), (2,), 'VALID')", "jax.lax.reduce_window({r2}, 0.0, jax.lax.add, (2, 1), (2, 1), 'VALID')",
        "jax.lax.conv_general_dilated({r2}[None], params['table'].reshape(3, 4, 4)[:, :{F}], (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))[0]", "jax.lax.conv_general_dilated({r2}[None], params['table'].reshape(3, 4, 4)[:1, :{F}], (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))[0]",
        "jax.lax.conv_general_dilated({r1}[None, :, None], params['v'][:3].reshape(3, 1, 1), (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))[0, :, 0]", "jax.image.resize({r2}, ({F}, {F}), 'linear')",
    ],
    "positions": [
        "{r1} * jnp.arange(B)", "{r1} + jnp.linspace(0, 1, B)", "{r1} * (jnp.arange(B) < 4)", "{r1} * (jnp.arange(B) < B // 2)", "{r1} * (jnp.arange(B) % 2)", "{r1} * (jnp.arange(B) >= 0)", "jnp.where(jnp.arange(B) > 0, {r1}, 0.0)", "{r2} * jax.lax.broadcasted_iota(float, (B, {F}), 0)", "{r2} * jax.lax.broadcasted_iota(float, (B, {F}), 1)", "{r1} * params['v'][:B]", "{r1} + TABLE[:B, 0]", "params['pos'][:B] * {r1}[:, None]", "params['pos'][jnp.arange(B)] * {r1}[:, None]",
        "params['v'].reshape(B, -1)[:, :1] * {r1}[:, None]", "{r1} * jnp.repeat(params['v'][:2], B // 2)", "{r1} * jnp.tile(params['v'][:2], B // 2)", "{r1} * jnp.resize(params['v'], (B,))", "{r1} * params['v'][-B:]", "{r1} * params['v'][:12 - B + 1].sum()", "{r1} * params['v'][B - 1]", "{r1} * params['v'][:B].sum()", "{r1} * jnp.mean(params['v'][:B])", "{r1} * jnp.broadcast_to(params['v'][:1], B)", "jnp.broadcast_to(params['v'][:2], (B, 2)) * {r1}[:, None]",
        "{r1} * jax.lax.dynamic_slice_in_dim(params['v'], 0, B)", "{r1} * jax.lax.dynamic_slice_in_dim(params['v'], 12 - B, 1)[0]", "{r1} * jnp.eye(B)[0]", "{r1} @ jnp.eye(B, 3)", "{r1} * jnp.sin(jnp.arange(B))", "{r1} * jax.random.normal(jax.random.key(0), (B,))", "{r1} * jnp.asarray(np.arange(B) > 1)", "{r1} * np.linspace(1, 1, B)", "{r1} * jnp.pad(jnp.ones(B - 1), (1, 0))", "{r1} * jnp.cumsum(jnp.ones(B))", "{r1} * TABLE.ravel()[: 4 * B : 4]", "{r1} * TABLE.ravel()[:B]", "{r1} @ params['pos'][:B]", "{r1} @ params['pos'][:B] / B",
        "params['table'][jnp.arange(B) % 3]", "params['table'][label + B - 8]", "params['table'][jnp.minimum(label, B)]", "params['table'][jnp.arange(B)[label]]", "{r1} * jnp.ones(B).at[0].set(0.0)", "{r1} * jax.nn.one_hot(0, B)", "{r1} * jax.nn.one_hot(label, B).sum(0)", "{r1} * jax.nn.one_hot(label, B).sum(1)", "{r1} * (label == jnp.arange(B))", "{r1} * jnp.ones(12)[:B]", "{r1} * jnp.zeros(B).at[jnp.arange(B)].set(1.0)",
    ],
    "branches": [
        "jax.lax.cond({r}.sum() > 0, jnp.sin, jnp.cos, {r})", "jax.lax.cond(B > 4, jnp.sin, jnp.cos, {r})", "jnp.sin({r}) if B > 4 else {r}", "jnp.sin({r}) if B > 1 else {r}", "{r} * 2 if B % 4 else {r}", "jax.lax.fori_loop(0, B, lambda i, a: a * 0.9, {r})", "jax.lax.fori_loop(0, B, lambda i, a: a + {s}[i], {r})", "jax.lax.fori_loop(0, B, lambda i, a: a.at[i].multiply(2.0), {r})", "functools.reduce(lambda a, _: jnp.sin(a), range(B), {r})",
        "functools.reduce(lambda a, i: a + {r1}[i], range(B), 0.0) * {r1}", "jax.lax.while_loop(lambda s: s[0] < B, lambda s: (s[0] + 1, s[1] * 0.9), (0, jax.lax.stop_gradient({r})))[1]", "jax.lax.while_loop(lambda s: jnp.abs(s).max() > 0.5, lambda s: s * 0.5, jax.lax.stop_gradient({r}))", "jax.lax.cond({r1}[0] > 0, jnp.sin, jnp.cos, {r1})", "jax.lax.cond(label.sum() > 3, jnp.sin, jnp.cos, {r})", "jax.lax.switch(B % 3, [jnp.sin, jnp.cos, jnp.tanh], {r})", "jax.lax.switch(label[0], [jnp.sin, jnp.cos, jnp.tanh], {r})",
        "jax.lax.map(lambda i: {r}[i], jnp.arange(B))", "jax.lax.map(lambda i: {r}[B - 1 - i], jnp.arange(B))", "jax.vmap(lambda i: {r1}[i] * {r1})(jnp.arange(B))", "jax.vmap(lambda i: {r}[i])(label)", "jax.vmap(lambda a: a * {r1}.sum())({r1})", "jax.vmap(lambda a, i: a * i)({r1}, jnp.arange(B))", "jax.vmap(lambda a: a - a.mean(), in_axes=1, out_axes=1)({r2})", "jax.vmap(lambda a: jnp.sort(a), in_axes=1)({r2})", "jax.vmap(lambda a: a / jax.lax.psum(1, 'rows'), axis_name='rows')({r})", "jax.vmap(lambda a: a - jax.lax.pmean(a, 'rows'), axis_name='rows')({r})",
    ],
    "carries": [
        "jax.lax.scan(lambda c, a: (c + a, None), jnp.zeros({r}.shape[1:]), {r})[0]", "jax.lax.scan(lambda c, a: (c + a, None), jnp.zeros({r}.shape[1:]), {r})[0] / B", "jax.lax.scan(lambda c, a: (c + a, c), jnp.zeros({r}.shape[1:]), {r})[1]", "jax.lax.scan(lambda c, a: (c * 0.9 + a, None), jnp.zeros({r}.shape[1:]), {r})[0]", "jax.lax.scan(lambda c, a: (-c + a, None), jnp.zeros({r}.shape[1:]), {r})[0] / B", "jax.lax.scan(lambda c, a: (a - c, c), jnp.zeros({r}.shape[1:]), {r})[1]", "jax.lax.scan(lambda c, a: (jnp.roll(c, 1) + a, None), jnp.zeros({F}), {r2})[0] / B",
        "jax.lax.scan(lambda c, a: (a, c), jnp.zeros({r}.shape[1:]), {r})[1]", "jax.lax.scan(lambda c, a: (a, None), jnp.zeros({r}.shape[1:]), {r})[0]", "jax.lax.scan(lambda c, a: (jnp.maximum(c, a), None), jnp.zeros({r}.shape[1:]), {r})[0]", "jax.lax.scan(lambda c, a: (c.at[0].set(a[0]) + a, None), jnp.zeros({F}), {r2})[0] / B", "jax.lax.scan(lambda c, a: (c * a, None), jnp.ones({r}.shape[1:]), {r})[0]", "jax.lax.scan(lambda c, a: (c + jnp.tanh(a + c), None), jnp.zeros({r}.shape[1:]), {r})[0] / B",
        "jax.lax.scan(lambda c, a: ((c[0] + 1, c[1] + a), None), (0.0, 0.0), {r1})[0][1] / B", "jax.lax.scan(lambda c, a: ((c[0] + 1, c[1] + c[0] * a), None), (0.0, 0.0), {r1})[0][1] / B", "jax.lax.scan(lambda c, a: ((c[1], c[0] + a), None), (0.0, 0.0), {r1})[0][1] / B", "jax.lax.scan(lambda c, a: (c + c[::-1] * 0.5 + a, None), jnp.zeros({F}), {r2})[0] / B", "jax.lax.scan(lambda c, a: (c + a, None), 5.0, {r1})[0] / B", "jax.lax.scan(lambda c, a: (c + 1.0, c * a), 0.0, {r})[1]", "jax.lax.scan(lambda c, a: (c + a * 0.5 + 0.1, None), 0.0, {r1})[0] / B",
        "jax.lax.scan(lambda c, i: (c + {r1}[i], None), 0.0, jnp.arange(B))[0] / B", "jax.lax.scan(lambda c, i: (c + {r1}[i] * i, None), 0.0, jnp.arange(B))[0] / B", "jax.lax.scan(lambda c, a: (c + a, c), 0.0, {r1}, reverse=True)[1]", "jax.lax.scan(lambda c, a: (c.at[label[0]].add(a), None), jnp.zeros(3), {r1})[0] / B", "jax.lax.scan(lambda c, a: (c.at[a[1]].add(a[0]), None), jnp.zeros(3), ({r1}, label))[0] / B", "jax.lax.scan(lambda c, a: (c.at[a[1]].set(a[0]), None), jnp.zeros(3), ({r1}, label))[0]",
        "jax.lax.scan(lambda c, _: (c * 0.5 + {r}, None), jnp.zeros((B{rest})), None, length=B)[0]", "jax.lax.scan(lambda c, _: (c * 0.5 + {r}, None), jnp.zeros((B{rest})), None, length=3)[0]", "jax.lax.scan(lambda c, a: (jax.lax.cond(a > 0, lambda: c + a, lambda: c), None), 0.0, {r1})[0] / B", "jax.lax.scan(lambda c, a: (jnp.where(a > 0, c + a, 0.0), None), 0.0, {r1})[0] / B", "jax.lax.scan(lambda c, a: (jnp.where(a > 0, c + a, c), None), 0.0, {r1})[0] / B", "jax.lax.scan(lambda c, a: (c.at[:1].add(a), None), jnp.zeros(3), {r1})[0] / B",
    ],
    "numbers of turns": [
        "jax.lax.fori_loop(0, B - 1, lambda i, c: c + {r1}[0], 0.0) / B", "jax.lax.fori_loop(0, B // 2, lambda i, c: c + {r1}.mean(), 0.0)", "jax.lax.fori_loop(0, B - 1, lambda i, c: c + params['v'][0], 0.0) / B * {r1}", "jax.lax.fori_loop(0, 2 * B, lambda i, c: c + params['v'][0], 0.0) / B * {r1}",
        "jax.lax.fori_loop(1, B, lambda i, c: c + params['v'][0] * i, 0.0) / B", "jax.lax.scan(jax.checkpoint(lambda c, a: (c * 0.9 + a, None)), 0.0, {r1})[0] / B", "jax.lax.scan(jax.checkpoint(lambda c, a: (c + a * c, None)), 1.0, {r1})[0]", "jax.lax.scan(jax.checkpoint(lambda c, a: (c + a, c)), 0.0, {r1})[1]",
        "jax.lax.scan(jax.jit(lambda c, a: ((c[1] + a, c[0]), None)), (0.0, 0.0), {r1})[0][0] / B", "jax.lax.scan(jax.jit(lambda c, a: (a - c, None)), 0.0, {r1})[0] / B", "jax.vmap(lambda a: jax.lax.while_loop(lambda s: jnp.abs(s) > 0.5, lambda s: s * 0.5, a - {r1}.mean()))(jax.lax.stop_gradient({r1}))",
        "jax.vmap(lambda a: jax.lax.fori_loop(0, label[0], lambda i, s: s * 0.5, a))(jax.lax.stop_gradient({r}))",
    ],
    "sums of integers": [
        "{r1} * jnp.sum(label.astype(jnp.int8) * jnp.int8(60))", "{r1} * jnp.sum(label.astype(jnp.uint8))", "(-jnp.sum(label.astype(jnp.uint32))) * params['v'][0]", "jnp.sum(label * 40, dtype=jnp.int8) / B * params['v'][0]", "jnp.zeros(3, jnp.int8).at[label].add(jnp.int8(50)).sum() * params['v'][0]",
        "jnp.cumsum(label)[-1] // 2 * params['v'][0]", "(jnp.sum(label) - jnp.sum(label * label)).astype(jnp.uint16) * params['v'][0]", "jnp.prod(1 + label) * params['v'][0]", "jnp.sum(label) * jnp.sum(label) / B * params['v'][0]", "jnp.sum(label) / B * params['v'][0]",
    ],
    "draws of all": [
        "{r1} * jax.random.uniform(jax.random.key(1), (B,))", "{r1} * jax.random.permutation(jax.random.key(1), B)", "{r} * jax.random.uniform(jax.random.key(B))", "{r1} * jax.random.uniform(jax.random.fold_in(jax.random.key(0), label.sum()))", "jax.random.permutation(jax.random.key(1), {r})",
        "{r1}[jax.random.randint(jax.random.key(1), (B,), 0, B)]", "jax.vmap(lambda a, k: a * jax.random.uniform(k))({r}, jax.random.split(jax.random.key(3), B))", "jax.vmap(lambda a, k: a * jax.random.uniform(jax.random.fold_in(jax.random.key(3), k)))({r}, jnp.arange(B))",
    ],
    "rules": [
        "jax.lax.scan(lambda c, a: (c, sign_of_gradient(a)), 0.0, {r})[1]", "jax.vmap(slope_over_count)({r2})", "jax.jit(jax.checkpoint(clipped_gradient))({r})",
        "gradient_over_count({r})", "gradient_less_mean({r})", "sign_of_gradient({r})", "clipped_gradient({r})", "gradient_by_last_row({r})", "shifted_gradient({r})", "slope_over_count({r})", "slope_less_mean({r})", "slope_by_mean({r})", "halves_gradient({r}.mean(0))", "sign_of_gradient({r}.mean(0))", "{r2} * sign_of_gradient({v})", "{r2} @ clipped_gradient({w})", "{r2} @ halves_gradient({w})", "{r2} @ gradient_over_count({w})", "{r2} @ shifted_gradient({w})", "{r2} @ slope_of_its_own({w})",
        "jax.vmap(halves_gradient)({r})", "jax.vmap(sign_of_gradient)({r})", "jax.vmap(slope_of_its_own)({r})", "jax.vmap(gradient_less_mean)({r2})", "jax.checkpoint(gradient_less_mean)({r})", "jax.jit(gradient_over_count)({r})", "jax.lax.scan(lambda c, a: (c, gradient_over_count(a)), 0.0, {r2})[1]", "jax.checkpoint(lambda a: a - a.mean(0))({r})", "jax.jit(lambda a: a / (1 + jnp.sum(a ** 2)))({r})", "jax.grad(lambda a: jnp.mean(jnp.sin(a)))({r})", "jax.grad(lambda a: jnp.mean(jnp.sin(a)))({r}) * B", "jax.grad(lambda a: jnp.sum(a.mean(0) ** 2))({r})",
        "{r} * jax.lax.stop_gradient({r}.mean(0))", "jax.lax.stop_gradient({r} - {r}.mean(0)) * {r}", "{r} + jax.lax.stop_gradient({r}.mean(0)) - {r}.mean(0)", "{r2} @ jax.grad(lambda w: jnp.mean(jnp.tanh({r2} @ w)))({w})", "{r2} @ ({w} - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh({r2} @ w) ** 2))({w}))", "optax.projections.projection_simplex({r1})", "{r2} / jnp.sqrt(jnp.sum({r2} ** 2))",
    ],
}  # fmt: skip
"""Mostly what mixes rows, or depends on their number or place; some of it does not, or is undone by
a mean at the end.
"""

ENDINGS = [
    "jnp.mean({r})", "{r}.sum() / B", "jnp.sum({r}) / {r}.size", "jnp.mean(jnp.sum({r2}, -1))", "so.losses.Weighted(jnp.sum({r} * {q}), jnp.sum({q}))", "so.losses.Weighted(jnp.sum({r}), {r}.size)", "so.losses.Weighted((jnp.sum({r}), jnp.sum({s} * {q})), (B, jnp.sum({q})))", "so.losses.Weighted(jnp.sum({r1} * mask), jnp.sum(mask) + 1e-9 * B)", "{c} * {m}", "jnp.mean({r1}) + 0.1 * {m}",
    "jnp.mean({r1}) + 0.01 * jnp.sum(params['w'] ** 2)", "jnp.einsum('b->', {r1}) / B", "jnp.dot({r1}, jnp.ones(B)) / B", "jnp.average({r1})", "jnp.mean({r}) - {m}", "{m} * jnp.sum(params['v'])", "jnp.mean({r}) * params['v'][0]", "jnp.mean({r} * {q})", "jnp.mean(jnp.mean({r2}, 0))", "so.losses.Weighted(jnp.sum(jnp.where({q} > 0, {r}, 0.0)), jnp.sum({q} > 0) + 0.1 * B)", "jax.checkpoint(lambda a: jnp.mean(a ** 2))({r})", "jnp.vdot({r}, {s}) / B",
    "jnp.mean({o})", "jnp.mean({o})", "jnp.mean(jnp.sin({o}))", "jnp.sum({o})", "jnp.sum({o}) / B", "jnp.mean({o} ** 2)", "so.losses.Weighted(jnp.sum({o}), B)", "so.losses.Weighted(jnp.sum({o}), {o}.size)",
]  # fmt: skip
"""Losses; those of rows are means over them."""

WRONG_ENDINGS = [
    "jnp.sum({r})", "jnp.mean({r}) ** 2", "jnp.sqrt(1 + jnp.mean({r}) ** 2)", "{m} * jnp.mean({r})", "jnp.mean({r}) / (2 + {m} ** 2)", "jnp.max({r})", "jax.nn.logsumexp({r})", "jnp.prod({r1})", "jnp.sum({r}) * B", "jnp.sum({r}) / B ** 2", "jnp.mean({r}) / B", "so.losses.Weighted(jnp.mean({r}), jnp.mean({q} ** 2))", "so.losses.Weighted(jnp.sum({r1}), jnp.sum(params['v'] ** 2))", "so.losses.Weighted(jnp.sum({r1}), jnp.sum(jax.nn.sigmoid({r1})))",
    "so.losses.Weighted(jnp.sum({r}), jnp.sum({q} ** 2) * B)", "jnp.median({r})", "jnp.abs(jnp.mean({r})) ** B", "jax.lax.cond({m} > 0, jnp.mean, jnp.sum, {r})", "jnp.sum({r1} * {q}) / jnp.sum({q} ** 2)", "jnp.mean({r}) + jnp.log(B)", "jnp.mean({r}) + 1 / B", "jnp.std({r})", "jnp.linalg.norm({r1})", "jnp.mean({r}) * jnp.sum({s})", "so.losses.Weighted(jnp.sum({r}) ** 2, B)", "so.losses.Weighted(jnp.max({r}), 1.0)", "so.losses.Weighted(jnp.sum({r}), jnp.sum({q}) ** 2)", "jnp.abs({m})", "jnp.tanh({m})", "jnp.maximum({m}, 0.0)",
    "jnp.mean({r}) * ({m} > 0)", "jnp.sum({r1})", "so.losses.Weighted(1.0, jnp.sum({q} ** 2))", "so.losses.Weighted(jnp.mean({r}), 1.0)", "so.losses.Weighted(jnp.mean({r}) * jnp.sum({q} ** 2), jnp.sum({q} ** 2))", "so.losses.Weighted((jnp.sum({r}), {m}), (B, jnp.sum({q} ** 2)))", "jnp.mean({r}, where={q} > 0)", "jnp.mean({r}[:B - 1])", "sign_of_gradient(jnp.mean({r}))", "clipped_gradient(jnp.sum({r})) / B", "halves_gradient(jnp.mean({r}))", "jnp.nanmean({r})", "jnp.percentile({r1}, 30)", "jnp.sum({r1}) / max(B, 5)", "jnp.sum({r1}) / (B - 1 + 1e-3)", "{m} + jnp.sum({r1})",
]  # fmt: skip
"""Losses that are mostly no means."""

METRICS = [
    "so.losses.Sum(jnp.sum(label == 1))", "so.losses.Max(jnp.max(label))", "so.losses.Sum(jnp.sum(label.astype(jnp.int32)))", "so.losses.Min(jnp.min({r1} * label))",
    "jnp.mean({r})", "so.losses.Weighted(jnp.sum({r1} * mask), jnp.sum(mask) + 1e-3 * B)", "so.losses.Sum(jnp.sum({r}))", "so.losses.Max(jnp.max({r}))", "so.losses.Min(jnp.min({r}))", "so.losses.Sum(B)", "so.losses.Max(jnp.max(jnp.abs({r1})))", "jnp.mean({r1} > 0)", "so.losses.Min(-jnp.max({r1}))", "so.losses.Sum(jnp.sum({r1} > 0))", "so.losses.Max(2 * jnp.max({r1}) + 1)", "jnp.mean(label == 1)",
]  # fmt: skip
"""Metrics that their parts make up."""

WRONG_METRICS = [
    "so.losses.Sum(jnp.sum(label.astype(jnp.int8) * jnp.int8(60)))", "so.losses.Max(jnp.sum(label))", "so.losses.Min(-jnp.max(label.astype(jnp.uint8)))", "so.losses.Max(jax.random.uniform(jax.random.key(B)))", "so.losses.Max(jnp.max(label) * jnp.max(label))", "so.losses.Sum(jnp.sum(label) // 2)",
    "so.losses.Sum(jnp.mean({r}))", "so.losses.Max(jnp.mean({r}))", "so.losses.Max(jnp.sum({r}))", "so.losses.Min(jnp.max({r}))", "so.losses.Max(-jnp.max({r}))", "so.losses.Max(jnp.min({r}))", "jnp.max({r})", "so.losses.Sum(jnp.max({r}))", "so.losses.Max(B)", "so.losses.Sum(1.0)", "jnp.sum({r})", "so.losses.Max(jnp.max({r}) * jnp.min({r}))", "so.losses.Min(jnp.median({r}))", "so.losses.Max(jnp.max({r}) - jnp.min({r}))", "so.losses.Max(jnp.max({r1} - {r1}.mean()))", "so.losses.Weighted(jnp.sum({r}), 1.0)",
    "so.losses.Max(jnp.sum(params['v']) * jnp.max({r}))", "so.losses.Max(jnp.sort({r1})[-1])", "so.losses.Max({r1}[-1])", "so.losses.Sum(jnp.sum({r}) ** 2)", "so.losses.Max(jnp.abs(jnp.min({r1})))", "so.losses.Max(jnp.linalg.norm({r1}))", "so.losses.Max(jax.nn.logsumexp({r1}))", "so.losses.Sum({r1}.shape[0] ** 2)", "so.losses.Max(jnp.argmax({r1}))", "so.losses.Min(jnp.sum({r1} ** 2))", "so.losses.Max(jnp.prod({r1}))", "so.losses.Max({r1}.max() ** 3)", "so.losses.Min(jnp.sum(params['v']))",
]  # fmt: skip
"""Metrics that are mostly not what they say."""
