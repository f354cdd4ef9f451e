"""Comparing with one device notices attention over a context axis that is broken on purpose."""

import importlib

import pytest
from support.contexts import difference, drawn, mesh_of
from support.seams import break_function

from shardopt.kernels import _flash as flash
from shardopt.nn import _exchange as exchange
from shardopt.nn import _ring as ring

pytestmark = pytest.mark.slow

attention = importlib.import_module("shardopt.nn._attention")


def masked_one_hop_off(patch):
    seen = ring._key_marks
    break_function(
        patch, ring._key_marks, lambda *args: lambda hop, marks: seen(*args)(hop + 1, marks)
    )


def stale_keys_in_the_backward_pass(patch):
    first = []
    right = flash.gradients

    def gradients(queries, keys, rule):
        first.append((keys.key, keys.value))
        return right(queries, keys._replace(key=first[0][0], value=first[0][1]), rule)

    break_function(patch, flash.gradients, gradients)


def gradients_of_keys_left_where_they_were_made(patch):
    send = ring.send
    break_function(
        patch, ring.send, lambda ring, tree, hops=1: tree if hops < 0 else send(ring, tree, hops)
    )


def positions_that_are_not_compared(patch):
    break_function(patch, attention._as_rows, lambda name, ids, shapes: None)


def segments_that_do_not_travel(patch):
    send = ring.send

    def moved(ring, tree, hops=1):
        if len(tree) == 3:
            return flash.Keys(*send(ring, tree[:2], hops), tree[2])
        return send(ring, tree, hops)

    break_function(patch, ring.send, moved)


def normalised_by_the_last_block(patch):
    right = flash.absorb

    def absorb(state, *args):
        return right(state._replace(total=0 * state.total), *args)

    break_function(patch, flash.absorb, absorb)


def heads_of_the_neighbour(patch):
    right = attention.attend
    break_function(
        patch,
        attention.attend,
        lambda ring, heads: right(ring, heads._replace(key=heads.key[:, :, ::-1])),
    )


def gradients_of_keys_not_summed(patch):
    break_function(patch, exchange.psum_scatter, lambda x, axes, dim: x[:, :, : x.shape[2] // 4])


@pytest.mark.parametrize(
    ("broken", "how"),
    [
        (None, {"method": "ring"}),
        (masked_one_hop_off, {"method": "ring"}),
        (stale_keys_in_the_backward_pass, {"method": "ring"}),
        (gradients_of_keys_left_where_they_were_made, {"method": "ring"}),
        (positions_that_are_not_compared, {"method": "ring", "order": "zigzag"}),
        (segments_that_do_not_travel, {"method": "ring", "packed": True}),
        (normalised_by_the_last_block, {"method": "ring"}),
        (heads_of_the_neighbour, {"method": "all_to_all"}),
        (gradients_of_keys_not_summed, {"method": "all_gather"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_each_mutation_is_noticed(broken, how, x64, monkeypatch):
    how = dict(how)
    batch = drawn(groups=8, packed=how.pop("packed", False))
    if broken is not None:
        broken(monkeypatch)
    assert (difference(mesh_of(context=4), batch, **how) > 1e-3) == (broken is not None)
