"""Processes that begin with other parameters, seeds, options or code are told apart by name, before
anything is trained.
"""

import json
from pathlib import Path

import pytest
from support.processes import run_processes

WORKER = Path(__file__).with_name("worker_start.py")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def outcomes(request):
    """Return the processes without the last one, as text, the last one, and the results of each of
    them.
    """
    count = request.param
    outputs = run_processes(WORKER, count, count, timeout=900)
    first_processes = {2: "process 0", 4: "processes 0, 1 and 2"}[count]
    return first_processes, f"process {count - 1}", [json.loads(output.last) for output in outputs]


def test_the_same_start_is_accepted(outcomes):
    for outcome in outcomes[2]:
        assert float(outcome["same"]) > 0
        assert outcome["same numbers and arrays"] == "float32"


def message(outcomes, name):
    """Return the message that all processes got."""
    messages = {outcome[name] for outcome in outcomes[2]}
    assert len(messages) == 1
    return messages.pop()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("one nested leaf", "blocks/1/b: differs between {others} and {last}"),
        ("one bit", "w: differs between {others} and {last}"),
        ("a number", "s: differs between {others} and {last}"),
        ("another shape", "w: float32[4] on {others}, float32[8] on {last}"),
        ("text", "w: object[2] on {others}, int64[2] on {last}"),
        ("another dtype", "w: float32[4] on {others}, float16[4] on {last}"),
        ("a leaf more", "bias: nothing on {others}, float32[4] on {last}"),
    ],
)
def test_parameters_that_differ_are_named_by_key_path_and_process(outcomes, name, line):
    first_processes, last, _ = outcomes
    assert message(outcomes, name) == (
        "ValueError: fsdp: processes begin with different parameters.\n  "
        + line.format(others=first_processes, last=last)
        + "\nFix: draw them from one seed on all processes, without jax.process_index(), and load"
        " them from the same files; or let opt.init(init_fn, rng) compute them."
    )


@pytest.mark.parametrize("name", ["one draw a process", "a jax array"])
def test_parameters_that_each_process_draws_are_named(outcomes, name):
    text = message(outcomes, name)
    assert "\n  w: differs between process 0 and process 1" in text
    assert "\n  v: " not in text


@pytest.mark.parametrize(
    "name",
    ["another seed", "a seed for each process", "a split key", "another seed of init_fn"],
)
def test_keys_that_differ_are_named(outcomes, name):
    text = message(outcomes, name)
    assert text.startswith(
        "ValueError: fsdp: processes have different random keys.\n  rng: differs"
    )
    assert "jax.random.key(seed) with one seed" in text


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("micro_batches", "micro_batches: 1 on {others}, 2 on {last}"),
        ("min_shard_elements", "min_shard_elements: 1 on {others}, 2 on {last}"),
        ("gather_dtype", "gather_dtype: None on {others}, bfloat16 on {last}"),
        ("rules", "rules: () on {others}, (('w', frozen)) on {last}"),
        ("num_steps", "num_steps: 3 on {others}, 4 on {last}"),
        ("log_every", "log_every: 3 on {others}, 4 on {last}"),
        ("evaluate", "evaluate: None on {others}, a function on {last}"),
        ("early_stopping", "patience=1, min_delta"),
    ],
)
def test_options_that_differ_are_named_with_their_values(outcomes, name, line):
    first_processes, last, _ = outcomes
    text = message(outcomes, name)
    assert "processes have different options.\n" in text
    assert line.format(others=first_processes, last=last) in text


@pytest.mark.parametrize("name", ["learning rate", "schedule", "optimizer", "loss", "init_fn"])
def test_code_that_differs_is_named_by_the_first_line_of_the_program(outcomes, name):
    first_processes, last, _ = outcomes
    text = message(outcomes, name)
    assert text.startswith("ValueError: fsdp: processes compile different programs")
    assert f"\n  {first_processes}: " in text
    assert f"\n  {last}: " in text


def test_processes_that_call_other_functions_are_told_so(outcomes):
    first_processes, last, _ = outcomes
    for outcome in outcomes[2]:
        assert "the processes do different things" in outcome["another call"]
        assert (
            f"\n  {first_processes}: evaluation\n  {last}: fit, comparing the start\n"
            in outcome["another call"]
        )
        assert "fsdp, comparing the start\n" in outcome["a step on one"]
        assert (
            f"\n  {first_processes}: fsdp, comparing the start\n  {last}: Checkpoints\n"
            in outcome["checkpoints on one"]
        )
