"""The bytes that a TPU stores, against layouts that its compiler chose and totals that it planned."""

import dataclasses

import pytest
from support.paths import PROGRAMS

from shardopt.hlo._hlo_text import tiled_nbytes
from shardopt.hlo._program import argument_padding
from shardopt.planning import HARDWARE, ParallelLayout, predict
from shardopt.planning._layout import abstract_opt_state, place, stored_bytes
from shardopt.planning._models import find_model

pytestmark = pytest.mark.fast

PROGRAM = (PROGRAMS / "v5e_fsdp.hlo").read_text()


@pytest.mark.parametrize(
    ("shape", "layout"),
    # of GPT-2 split over 16 chips, as libtpu 0.0.52 compiled it for v5e:4x4
    [
        ((2, 192, 768), "2,1,0:T(8,128)"),
        ((2, 48, 12, 128), "3,1,2,0:T(8,128)"),
        ((2, 2, 48), "2,1,0:T(2,128)"),
        ((2, 12, 64, 48), "2,3,1,0:T(8,128)"),
        ((2, 768, 1, 192), "1,3,2,0:T(8,128)"),
        ((50257, 48), "0,1:T(8,128)"),
        ((8, 1025), "1,0:T(8,128)"),
        ((768,), "0:T(1024)"),
        ((2,), "0:T(128)"),
        ((), ":T(128)"),
    ],
    ids=str,
)
def test_arrays_are_stored_as_the_compiler_lays_them_out(shape, layout):
    text = f"f32[{','.join(map(str, shape))}]{{{layout}}}"
    assert stored_bytes(shape, 4) == tiled_nbytes(text)


@pytest.mark.parametrize(
    ("name", "chip", "chips", "rows", "planned"),
    # what libtpu planned, from results/pod.json, with min_shard_elements=1024
    [
        ("gpt2", "v5p", 64, 8, 31_127_040),
        ("gpt2", "v6e", 256, 8, 8_262_144),
        ("llama3-8b", "v5p", 64, 1, 1_505_926_656),
        ("llama3-8b", "v5p", 512, 1, 188_235_264),
    ],
)
def test_arguments_are_those_of_the_placement_formula(name, chip, chips, rows, planned):
    shape = dataclasses.replace(find_model(name), length=1024)
    layout = ParallelLayout(data=chips)
    workload = shape.workload()
    placed = place(
        workload, layout, abstract_opt_state(workload, None), min_shard_elements=2**10, tiled=True
    )
    predicted_memory = predict(
        workload, layout, hardware=HARDWARE[chip], batch_size=rows * chips, placed=placed
    ).memory
    # of the random key; adamw's count and the step are 512 bytes each as well
    scalars = stored_bytes((), 4)
    assert (
        predicted_memory.params
        + predicted_memory.opt_state
        + stored_bytes((rows, 1025), 4)
        + 2 * scalars
        == planned
    )


def test_small_leaves_stay_whole_by_the_default_of_the_platform():
    workload = dataclasses.replace(find_model("llama3-8b"), num_layers=2, length=128).workload()
    opt_state = abstract_opt_state(workload, None)

    def opt_state_bytes(**options):
        return place(workload, ParallelLayout(data=64), opt_state, **options).opt_state

    norms = 5 * 4096 * 2 * 4  # five norms, two moments
    assert opt_state_bytes(min_shard_elements=2**14) - opt_state_bytes() == norms * 63 // 64
    assert opt_state_bytes(tiled=True) == opt_state_bytes(tiled=True, min_shard_elements=2**14)
    assert opt_state_bytes() == opt_state_bytes(min_shard_elements=2**10)


def test_the_padding_of_a_program_is_read_off_its_layouts():
    # two counts of steps and a random key, 512 bytes each where 4, 4 and 8 are needed; the weights
    # fill their tiles
    assert argument_padding(PROGRAM) == 3 * 512 - 16
    assert (
        argument_padding("HloModule m, entry_computation_layout={(f32[3,5]{1,0})->f32[3]{0}}\n")
        == 0
    )
