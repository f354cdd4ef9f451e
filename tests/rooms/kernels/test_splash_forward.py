"""The forward kernel of splash attention equals plain attention, also where a query sees no key.

Its cores do not race.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from support.tiers import tiered

from shardopt.kernels import _splash as splash
from shardopt.kernels import _splash_forward as splash_forward
from shardopt.kernels._flash import HIDDEN, Keys, Marks, MaskRule, State, capped
from shardopt.nn._attention import visible


@dataclasses.dataclass(frozen=True)
class Case:
    """Two rows of attention: heads of queries, and of keys."""

    length: int = 256
    heads: tuple[int, int] = (4, 2)
    width: int = 12
    values: int = 5
    causal: bool = True
    window: int | None = None
    packed: bool = False
    softcap: float | None = None
    dtype: str = "float32"


CASES = {
    "grouped heads, narrow values": Case(),
    "tiles, one head of keys": Case(length=384, heads=(4, 1)),
    "heads of three": Case(heads=(3, 1), width=192, values=192),
    "a head of keys each, wide": Case(heads=(2, 2), width=256, values=256, length=128),
    "window": Case(length=512, window=150),
    "window, packed": Case(length=384, window=200, packed=True),
    "packed, both ways": Case(causal=False, packed=True),
    "both ways": Case(causal=False),
    "soft cap": Case(length=384, softcap=0.7),
    "bfloat16": Case(width=64, values=64, dtype="bfloat16"),
}
FAST = ("grouped heads, narrow values", "window")


def operands(case):
    """Return queries, keys, values, segments and which keys each query sees."""
    rng = np.random.default_rng(0)

    def draw(heads, width):
        return jnp.asarray(rng.normal(size=(2, heads, case.length, width)), case.dtype)

    (H, G), T = case.heads, case.length
    query = draw(H, case.width) / 3
    key = draw(G, case.width)
    value = draw(G, case.values)
    segments = (
        jnp.asarray(np.sort(rng.integers(0, 3, (2, T)), axis=1), jnp.int32) if case.packed else None
    )
    mask = visible(T, causal=case.causal, window=case.window)[None]
    if segments is not None:
        mask &= segments[:, :, None] == segments[:, None, :]
    return query, key, value, segments, mask


def plain(query, key, value, mask, softcap):
    """Return mixed values and logarithms in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    scores = np.einsum("bhtk,bhsk->bhts", query, np.repeat(key, repeats, axis=1))
    scores = np.asarray(capped(scores, softcap), np.float64)
    weights = np.where(mask[:, None], np.exp(scores), 0)
    total = weights.sum(-1)
    return np.einsum("bhts,bhsk->bhtk", weights, np.repeat(value, repeats, axis=1)) / total[
        ..., None
    ], np.log(total)


@pytest.mark.parametrize("case", tiered(CASES, lambda case: case in FAST))
def test_results_are_those_of_plain_attention(case, monkeypatch):
    monkeypatch.setattr(splash_forward, "TILE", 128)
    case = CASES[case]
    query, key, value, segments, mask = operands(case)
    rule = MaskRule(case.causal, case.window, case.softcap)
    attend = jax.jit(lambda *operands: splash_forward.attend(*operands, segments, segments, rule))
    results = attend(query, key, value)
    assert results[0].dtype == query.dtype
    tolerance = 2e-5 if case.dtype == "float32" else 2e-2
    for values, expected in zip(results, plain(query, key, value, mask, case.softcap), strict=True):
        np.testing.assert_allclose(np.asarray(values, np.float64), expected, atol=tolerance)


@pytest.mark.fast
def test_a_query_that_sees_no_key_has_no_weight():
    """In a block of a ring a query may see no key.

    Then the sums over other blocks stay as they are.
    """
    query, key, value, *_ = operands(Case(heads=(1, 1), width=8, values=8))
    segments = jnp.asarray([[7] * 100 + [1] * 156] * 2, jnp.int32)
    key_segments = jnp.ones((2, 256), jnp.int32)

    @jax.jit
    def attend(query, key, value):
        return splash_forward.attend(
            query, key, value, segments, key_segments, MaskRule(True, None)
        )

    mixed, logsumexp = attend(query, key, value)
    assert np.isfinite(mixed).all()
    assert (np.asarray(logsumexp)[:, :, :100] < HIDDEN / 2).all()
    assert (np.abs(logsumexp)[:, :, 100:] < 100).all()
    grouped = query[:, :, None]
    state = State(jnp.zeros(grouped.shape[:-1]), jnp.ones(grouped.shape[:-1]), grouped)

    @jax.jit
    def absorb(state, grouped, key, value):
        keys = Keys(key, value, Marks(None, key_segments))
        return splash.absorb(state, grouped, Marks(None, segments), keys, MaskRule(True, None))

    after = absorb(state, grouped, key, value)
    for first, second in zip(state, after, strict=True):
        np.testing.assert_array_equal(first[:, :, :, :100], second[:, :, :, :100])
        assert (np.asarray(first)[:, :, :, 100:] != np.asarray(second)[:, :, :, 100:]).any()


def test_rows_whose_keys_do_not_fit_into_memory_are_mixed_by_the_kernel_of_jax(monkeypatch):
    case = Case(heads=(2, 1), width=128, values=128)
    query, key, value, _, mask = operands(case)
    # bytes: of a row, and of a head's block
    keys = 2 * 256 * 256 * 4
    head = 8 * 256**2 + 256 * (2 * 256 * 4 + 4 * 128)
    limits = [(keys + count * head) * 6 // 5 for count in (1, 2)]

    def heads_of(memory):
        return splash_forward.heads_of_step(query.shape, key.shape, 128, jnp.float32, memory)

    assert [heads_of(limit + offset) for limit in limits for offset in (-2, 2)] == [0, 1, 1, 2]
    monkeypatch.setattr(splash, "vmem", lambda: 2**20)
    monkeypatch.setattr(splash, "attend", None)
    run = jax.jit(lambda *operands: splash._run_kernel(*operands, None, None, MaskRule(True, None)))
    results = run(query, key, value)
    for values, expected in zip(results, plain(query, key, value, mask, None), strict=True):
        np.testing.assert_allclose(values, expected, atol=2e-5)


def test_cores_do_not_race(monkeypatch):
    """The kernel runs in the TPU interpreter with two cores, which notes accesses of one value by
    both.
    """
    call = pl.pallas_call
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    monkeypatch.setattr(
        pl,
        "pallas_call",
        lambda kernel, **options: call(kernel, **(options | {"interpret": params})),
    )
    monkeypatch.setattr(splash_forward, "TILE", 128)
    query, key, value, _, mask = operands(Case(heads=(2, 1), width=128, values=128))
    results = splash_forward.attend(query[:1], key[:1], value[:1], None, None, MaskRule(True, None))
    assert not interpreter.races.races_found
    pltpu.reset_tpu_interpret_mode_state()
    for values, expected in zip(
        results, plain(query[:1], key[:1], value[:1], mask, None), strict=True
    ):
        np.testing.assert_allclose(values, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("heads", "steps"), [((8, 2), 2), ((4, 1), 2), ((1, 1), 1), ((6, 2), 2), ((10, 2), 10)]
)
def test_two_cores_have_two_steps_of_heads_if_there_are_two_heads(heads, steps, monkeypatch):
    grids = []
    call = pl.pallas_call
    monkeypatch.setattr(
        pl,
        "pallas_call",
        lambda kernel, **options: grids.append(options) or call(kernel, **options),
    )
    shapes = [
        jax.ShapeDtypeStruct((1, count, 1024, 128), jnp.bfloat16)
        for count in (heads[0], heads[1], heads[1])
    ]
    jax.eval_shape(
        lambda *qkv: splash_forward.attend(*qkv, None, None, MaskRule(True, None)), *shapes
    )
    assert grids[0]["grid"] == (1, steps, 2)
    assert grids[0]["cost_estimate"].flops == 2 * 512**2 * 3 * heads[0] * 256
