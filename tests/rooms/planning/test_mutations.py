"""The comparison with compiled steps can fail: each way of breaking a formula or the audit on
purpose is noticed.
"""

import pytest
from support.layouts import LAYOUTS, disagreements, traced
from support.seams import break_function

from shardopt.hlo import _collective as collective
from shardopt.hlo import _program as program
from shardopt.hlo import _walk as walk
from shardopt.planning import _costs as costs
from shardopt.planning import _layout as layout
from shardopt.planning import _workload as workload

pytestmark = pytest.mark.slow  # the contract is broken on purpose

DDP = "ddp, remat"
FSDP = "fsdp, tensor, remat"
PIPELINE = "zero bubble, zero1, tensor"


@pytest.fixture(autouse=True)
def own_workloads():
    """A planted fault neither sees a workload that was traced before it, nor leaves one."""
    traced.cache_clear()
    yield
    traced.cache_clear()


def forget_the_moments(patch):
    state_specs = layout.state_specs

    # as if the optimizer state were replicated over data
    def replicated(*args, **options):
        return state_specs(*args, **options | {"sharded": False})

    break_function(patch, layout.state_specs, replicated, callers=[layout])


def keep_no_activations(patch):
    break_function(patch, costs._activation_bytes, lambda *args: 0.0)


def hold_no_gradients(patch):
    break_function(patch, costs._gradient_bytes, lambda *args: 0.0)


def gather_once_for_both_passes(patch):
    over_data = costs._over_data

    def once(placed):
        return [
            transfer._replace(calls=transfer.calls / 2)
            if transfer.kind == "all-gather"
            else transfer
            for transfer in over_data(placed)
        ]

    break_function(patch, costs._over_data, once)


def reduce_every_micro_batch(patch):
    over_data = costs._over_data

    def each(placed):
        return [
            transfer._replace(calls=placed.layout.micro_batches * transfer.calls)
            for transfer in over_data(placed)
        ]

    break_function(patch, costs._over_data, each)


def permute_forwards_only(patch):
    over_pipeline = costs._over_pipeline

    def half(*args):
        permute, *other_transfers = over_pipeline(*args)
        return [permute._replace(calls=permute.calls / 2), *other_transfers]

    break_function(patch, costs._over_pipeline, half)


def sum_over_tensor_forwards_only(patch):
    over_tensor = costs._over_tensor

    def forwards(placed, *args):
        work = placed.workload
        return over_tensor(
            placed._replace(workload=work._replace(tensor_sums=(work.tensor_sums[0], 0))), *args
        )

    break_function(patch, costs._over_tensor, forwards)


def an_all_reduce_is_sent_once(patch):
    break_function(
        patch, collective._wire_bytes, lambda kind, size, n: size * (n - 1) // n if n else size
    )


def loops_turn_once(patch):
    break_function(patch, walk.trip_count, lambda *args: 1)


def branches_are_taken_at_every_tick(patch):
    break_function(patch, walk.times_taken, lambda turns, schedule: turns)


def count_multiplications_alone(patch):
    count = workload.count_flops
    break_function(patch, workload.count_flops, lambda jaxpr: [sum(count(jaxpr)) / 2])


def see_no_products_in_loops(patch):
    break_function(patch, program.trip_count, lambda *args: 1)


MUTATIONS = {
    forget_the_moments: (FSDP, "arguments"),
    keep_no_activations: (FSDP, "memory"),
    hold_no_gradients: (DDP, "memory"),
    gather_once_for_both_passes: (FSDP, "sent over data"),
    reduce_every_micro_batch: (PIPELINE, "sent over data"),
    permute_forwards_only: (PIPELINE, "sent over pipeline"),
    sum_over_tensor_forwards_only: (FSDP, "sent over tensor"),
    an_all_reduce_is_sent_once: (FSDP, "sent over tensor"),
    loops_turn_once: (FSDP, "sent over data"),
    branches_are_taken_at_every_tick: (PIPELINE, "sent over tensor"),
    count_multiplications_alone: (FSDP, "flops"),
    see_no_products_in_loops: (FSDP, "flops"),
}


@pytest.mark.parametrize(
    ("mutate", "name", "quantity"),
    [(m, *case) for m, case in MUTATIONS.items()],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_the_comparison_notices(mutate, name, quantity, monkeypatch):
    mutate(monkeypatch)
    assert quantity in disagreements(*LAYOUTS[name])
