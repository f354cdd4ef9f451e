"""Real processes pass their own rows, or the global batch. Both equal one device, and all processes
name a wrong claim.
"""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from support import rows as small_rows
from support.processes import run_processes

import shardopt as so

WORKER = Path(__file__).with_name("worker_rows.py")
COUNTS = [
    (2, "some"),
    pytest.param((2, "all"), marks=pytest.mark.slow),
    pytest.param((4, "all"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=COUNTS)
def outcomes(request, tmp_path_factory):
    """Return the number of processes, and the results of the cases on each of them."""
    count, part = request.param
    outputs = run_processes(WORKER, count, f"{count}-{part}", timeout=900)
    return count, [json.loads(output.last) for output in outputs]


def one_device(tx, batches):
    """Return the losses before each step on one device."""
    opt = so.ddp(tx, so.make_mesh(devices=jax.devices()[:1]), small_rows.loss_fn)
    state = opt.init(small_rows.first_params())
    losses = []
    for batch in batches:
        losses.append(float(opt.evaluate(state, batch)["loss"]))
        state, _ = opt.step(state, batch)
    return losses


EQUAL_TO_ONE_DEVICE = [
    "own fsdp",
    "global fsdp",
    "own ddp",
    "own micro-batches",
    "own rows in dim 1",
    "same rows, tensor parallel",
    "own jax arrays",
    "own tensors",
    "own lists",
    "own float64",
]


@pytest.mark.parametrize("name", EQUAL_TO_ONE_DEVICE)
def test_the_rows_of_all_processes_train_as_one_device_does(outcomes, name):
    if name not in outcomes[1][0]:
        pytest.skip("in the slow tier")
    expected = one_device(optax.adam(0.05), map(small_rows.whole, range(3)))
    for outcome in outcomes[1]:
        np.testing.assert_allclose(outcome[name], np.repeat(expected, 2), rtol=1e-5)


def test_a_strategy_says_which_part_of_the_rows_a_process_loads(outcomes):
    count, of_processes = outcomes
    for rank, outcome in enumerate(of_processes):
        process_part = [rank, count]
        pair = [rank // 2, count // 2]
        all_rows = [0, 1]
        assert outcome["parts"] == {
            "data": process_part,
            "tensor in a process": process_part,
            "tensor over two": pair,
            "tensor over all": all_rows,
            "context over two": pair,
            "replicas": process_part,
            "pipeline over two": pair,
            "one device of each": pair,
        }


def test_replicas_of_diloco_get_the_rows_of_their_process(outcomes):
    first, *later_outcomes = outcomes[1]
    for other in later_outcomes:
        np.testing.assert_allclose(other["own diloco"], first["own diloco"], rtol=1e-6)
    losses = first["own diloco"]
    np.testing.assert_allclose(
        losses[0], one_device(optax.sgd(0.0), [small_rows.whole(0)])[0], rtol=1e-6
    )


NOT_SPLIT = (
    "processes passed the same rows: each row would count more than once.\n  {who}\nFix: split the"
    " data over the processes (torch's DistributedSampler, datasets' split_dataset_by_node and"
    " grain's ShardByJaxProcess give each process its own). If each process passes the global"
    " batch, wrap the batches: so.GlobalRows(batches)."
)


@pytest.mark.parametrize(
    ("name", "caller"),
    [
        ("not split", "fsdp"),
        ("not split, fit", "fit"),
        ("split for five batches", "fit"),
        ("split for 17 batches", "fit"),
        ("not split, evaluation", "evaluation"),
        ("not split, integers", "fsdp"),
    ],
)
def test_a_loader_that_was_not_split_is_named(outcomes, name, caller):
    count, of_processes = outcomes
    process_groups = {2: "processes 0 and 1", 4: "processes 0, 1, 2 and 3"}[count]
    for outcome in of_processes:
        assert outcome[name] == f"ValueError: {caller}: {NOT_SPLIT.format(who=process_groups)}"


def test_a_loader_that_is_split_over_some_processes_only_is_named(outcomes):
    count, of_processes = outcomes
    process_groups = {2: "processes 0 and 1", 4: "processes 0 and 1\n  processes 2 and 3"}[count]
    for outcome in of_processes:
        assert outcome["split over half of the processes"].endswith(
            NOT_SPLIT.format(who=process_groups)
        )


NOT_GLOBAL = "so.GlobalRows says that all processes pass the same batch, but these differ.\n  "


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        ("split, called global", ["x", "y"]),
        ("global, one leaf differs", ["x"]),
        ("global, last rows differ", ["x"]),
        ("global, differs later", ["x", "y"]),
    ],
)
def test_a_global_batch_that_differs_is_named_by_its_leaves(outcomes, name, leaves):
    count, of_processes = outcomes
    parts = " and ".join(f"process {rank}" for rank in range(count))
    listed = "\n  ".join(f"{leaf}: differs between {parts}" for leaf in leaves)
    for outcome in of_processes:
        message = outcome[name].split(": ", 2)[2]
        assert message.startswith(f"{NOT_GLOBAL}{listed}\nFix: let each process pass its own rows")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("global, more rows on one", "process 1: x: float32[32, 4]"),
        ("global, dtype differs", "process 0: y: float32[16]"),
        ("a leaf more", ": mask: float32[rows]"),
        ("sequences differ", "process 1: x: float32[rows, 3]"),
        ("a number differs", "process 1: scale: 2.0"),
        ("own on one, global on others", "process 0: the global batch (so.GlobalRows)"),
        ("tensor parallel, other rows", "hold the same rows of the mesh"),
        ("rows that devices do not divide", "process 0: 2 rows\n  process 1: 3 rows"),
        ("no rows at all", "the rows of the processes add up to 0"),
    ],
)
def test_batches_that_do_not_fit_together_are_refused_by_all(outcomes, name, text):
    messages = {outcome[name] for outcome in outcomes[1]}
    assert len(messages) == 1
    assert messages.pop().startswith("ValueError: ")
    assert text in outcomes[1][0][name]


def test_rows_that_are_fewer_on_one_process_count_once_each(outcomes):
    count, of_processes = outcomes
    all_examples = small_rows.whole(0, 16 * count)
    sizes = [4] + [8] * (count - 1)
    numbers = [rank + count * i for rank, size in enumerate(sizes) for i in range(size)]
    union = jax.tree.map(lambda leaf: leaf[numbers], all_examples)
    pieces = 2 * count
    for outcome in of_processes:
        if len(numbers) % pieces:
            assert (
                f"add up to {len(numbers)}, which the {pieces} devices"
                in outcome["fewer rows on one"]
            )
        else:
            expected = float(small_rows.loss_fn(small_rows.first_params(), union))
            np.testing.assert_allclose(outcome["fewer rows on one"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("fewer batches on the first", 5),
        ("fewer batches on the last", 5),
        ("no batches on one", 0),
        ("fewer global batches", 5),
    ],
)
def test_fit_ends_on_all_processes_when_one_has_no_more_batches(outcomes, name, steps):
    assert [outcome[name] for outcome in outcomes[1]] == [[steps, "exhausted"]] * outcomes[0]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("a loader fails", "OSError: the disk is full"),
        ("a loader fails at once", "OSError: the disk is full"),
        ("a loader exits", "SystemExit: 3"),
    ],
)
def test_a_loader_that_fails_is_named_by_the_other_processes(outcomes, name, error):
    *waiting_outcomes, failed = outcomes[1]
    assert failed[name] == error
    for outcome in waiting_outcomes:
        assert outcome[name] == (
            "RuntimeError: fit: another process has no next batch, because of an error.\n  process"
            f" {len(waiting_outcomes)}: {error}"
        )


@pytest.mark.parametrize("name", ["a key", "a key for each row", "a key on one"])
def test_random_keys_in_a_batch_are_refused_with_the_remedy(outcomes, name):
    text = (
        "TypeError: fsdp: several processes cannot pass random keys in a batch.\n  key\nFix: let the"
        " loss take a keyword rng"
    )
    assert text in outcomes[1][1][name]


def test_a_batch_without_rows_is_named_by_the_other_processes(outcomes):
    assert (
        "process 1: ValueError: fsdp: no batch leaf has rows." in outcomes[1][0]["no rows on one"]
    )
    assert outcomes[1][1]["no rows on one"].startswith("ValueError: fsdp: no batch leaf has rows.")


def own_rows(count, step, sizes):
    whole_batch = small_rows.whole(step)
    numbers = [rank + count * i for rank, size in enumerate(sizes) for i in range(size)]
    return jax.tree.map(lambda leaf: leaf[numbers], whole_batch)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("evaluation, fewer rows", [(0, 99, 99), (1, 2, 3)]),
        ("evaluation, fewer batches", [(0, 99, 99), (1, 99, 0), (2, 99, 0)]),
        ("evaluation, no batches on one", [(0, 0, 99)]),
        ("evaluation, global", [(0, 99, 99), (1, None, None)]),
    ],
)
def test_an_evaluation_counts_each_row_once_however_they_are_split(outcomes, name, parts):
    count, of_processes = outcomes
    batches = []
    for step, of_first, of_others in parts:
        if of_first is None:
            batches.append(jax.tree.map(lambda leaf: leaf[:7], small_rows.whole(step)))
            continue
        sizes = [min(size, 16 // count) for size in (of_first, *[of_others] * (count - 1))]
        batches.append(own_rows(count, step, sizes))
    union = jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
    expected = float(small_rows.loss_fn(small_rows.first_params(), union))
    for outcome in of_processes:
        np.testing.assert_allclose(outcome[name], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own", ["the data by drawing 160 rows: batches have 32, they had 16", 160.0]),
        ("global", ["the data by drawing 160 rows: batches have 80, they had 16", 160.0]),
        ("the same", ["the data by drawing 10 batches", 160.0]),
        (
            "refused",
            "ValueError: fit: the checkpoint was saved after 160 rows, in batches of 16. Batches of"
            " 64 do not end there: 32 of the next rows would never be seen.\nFix: choose a batch"
            " size that divides 160, or train with batches of 16 rows to a checkpoint after a"
            " multiple of 64.",
        ),
    ],
)
def test_another_batch_size_goes_on_at_the_next_row_of_all_processes(outcomes, name, expected):
    assert [outcome[f"resized, {name}"] for outcome in outcomes[1]] == [expected] * outcomes[0]
