"""Positions in the data survive JSON.

A run that is broken off and resumed equals one that never was, bit for bit.
"""

import functools
import itertools
import json
import re

import grain
import jax
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.step._global_rows import RowsOfOne
from shardopt.training import EarlyStopping
from shardopt.training._fit import fit
from shardopt.training._stream import END, BatchStream


@functools.cache
def own_rows():
    """Return the rows of a mesh of one process."""
    return RowsOfOne(so.ddp(optax.sgd(0.1), so.make_mesh(), lambda params, batch: 0.0).config)


def own_stream(batches):
    return BatchStream(batches, own_rows())


def draw(stream, count):
    return [stream.draw() for _ in range(count)]


def put_back(batches, position):
    """Return a stream at the position, which went through JSON, and how it got there."""
    stream = own_stream(batches)
    how = stream.restore(json.loads(json.dumps(position)))
    return stream, how


POSITIONS = {
    "list": lambda: list(range(20)),
    "iterator": lambda: iter(range(20)),
    "map_dataset": lambda: grain.MapDataset.source(range(20)).shuffle(seed=1),
    "prefetched": lambda: grain.MapDataset.source(range(20)).shuffle(seed=1).to_iter_dataset(),
    "batched": lambda: (
        grain.MapDataset.source(range(40)).shuffle(seed=1).to_iter_dataset().map(lambda x: x + 1)
    ),
    "loader": lambda: grain.DataLoader(
        data_source=range(20),
        sampler=grain.samplers.IndexSampler(
            20, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=1
        ),
        worker_count=0,
    ),
}


@pytest.mark.parametrize("count", [0, 1, 7, 19, 20])
@pytest.mark.parametrize("source", POSITIONS)
def test_a_stream_goes_on_from_its_position(source, count):
    make = POSITIONS[source]
    stream = own_stream(make())
    draw(stream, count)
    restored, how = put_back(make(), stream.position())
    assert restored.drawn == stream.drawn == count
    assert draw(restored, 20 - count) == draw(stream, 20 - count)
    assert how == (
        f"the data by drawing {count} {'batch' if count == 1 else 'batches'}"
        if source in ("list", "iterator")
        else "the data from its saved state"
    )


def test_a_stream_that_ended_resumes_at_its_end():
    stream = own_stream([1, 2])
    assert draw(stream, 4) == [1, 2, END, END]
    assert stream.drawn == 2
    restored, _ = put_back([1, 2], stream.position())
    assert restored.draw() is END


def test_too_few_batches_are_refused():
    stream = own_stream(range(9))
    draw(stream, 5)
    message = (
        "fit: the batches end after 3, but the checkpoint was saved after 5.\n"
        "Fix: pass a fresh iterator over the same data."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        put_back(range(3), stream.position())


class OfProcess:
    """Batches of a process of its own: a state counts the batches that the process drew itself."""

    def __init__(self, rows):
        self.rows = rows
        self.drawn = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.drawn += 1
        rows = np.arange(12 * self.drawn, 12 * self.drawn + 12, dtype=np.float32)
        return {"x": jax.device_put(self.rows(rows)), "epoch": np.int32(0)}

    def get_state(self):
        return self.drawn

    def set_state(self, state):
        raise AssertionError("another number of processes says nothing to this one")


def test_the_state_of_another_number_of_processes_is_not_taken_but_its_last_batch_is_checked():
    stream = own_stream(OfProcess(lambda rows: rows))
    draw(stream, 3)
    position = stream.position()
    # all on this process
    assert position.items() >= {"drawn": 3, "state": {"json": 3}, "processes": 1}.items()
    position |= {"processes": 4}
    # in another order
    restored, how = put_back(OfProcess(lambda rows: rows[::-1]), position)
    assert (restored.drawn, how) == (3, "the data by drawing 3 batches")
    message = (
        "fit: 4 processes drew other rows in the last batch than 1 process: rows would be seen twice,"
        " or never.\nFix: let the rows of a global batch not depend on the number of processes:"
        " shuffle first, then let process p of n take rows p, p + n, ... of each global batch; or"
        " let every process draw the whole global batch."
    )
    for wrong in (lambda rows: rows + 1, lambda rows: np.repeat(rows[:6], 2)):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            put_back(OfProcess(wrong), position)


class Stateful:
    def __init__(self, state):
        self.state = state

    def __iter__(self):
        return self

    def __next__(self):
        return 0

    def get_state(self):
        return self.state

    def set_state(self, state):
        if state != self.state:
            raise KeyError("epoch")


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, {"b": None}], "c": 1.5},
        b"\x00\xff",
        "text",
        3,
        {1: 2},
        {"a": (1, 2)},
        {"a": b"x", None: [(), {(1, "b"): True}]},
    ],
)
def test_states_of_plain_python_survive(state):
    assert (
        put_back(Stateful(state), own_stream(Stateful(state)).position())[1]
        == "the data from its saved state"
    )


@pytest.mark.parametrize(
    "state", [object(), {"a": {1, 2}}, [1, {"a": len}], {"a": np.array([None])}]
)
def test_states_of_other_types_are_refused(state):
    with pytest.raises(TypeError) as caught:
        own_stream(Stateful(state)).position()
    text = str(caught.value)
    assert text.startswith(f"fit: the state of the batches cannot be stored: {state!r}: ")
    assert text.endswith(
        "Fix: let it be of dicts, lists, tuples, strings, numbers, bytes, and arrays of numpy or"
        " torch."
    )


def test_a_state_that_is_refused():
    message = (
        "fit: the batches cannot be put back to their position after 0 batches: 'epoch'\n"
        "Fix: pass batches made as in the run that saved it."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        put_back(Stateful("other"), own_stream(Stateful("one")).position())


def of_list(batches):
    return iter(batches)


def of_grain(batches):
    """An iterator of dict state, that reads ahead in a thread."""
    source = grain.MapDataset.source(batches).shuffle(seed=3).repeat()
    return iter(source.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


def of_grain_dataset(batches):
    return grain.MapDataset.source(batches).shuffle(seed=3).repeat().to_iter_dataset()


def of_map_dataset(batches):
    return grain.MapDataset.source(batches).shuffle(seed=3)


def of_loader(batches):
    """A loader of bytes state."""
    sampler = grain.samplers.IndexSampler(
        len(batches), grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=3
    )
    return grain.DataLoader(data_source=batches, sampler=sampler, worker_count=0)


@pytest.mark.parametrize(
    "source",
    tiered(
        [of_list, of_grain, of_grain_dataset, of_map_dataset, of_loader],
        lambda source: source in (of_list, of_grain),
    ),
)
def test_resumed_equals_unbroken(opt, new_state, batches, memory, same, source):
    unbroken = fit(opt, new_state(), source(batches), num_steps=30, progress=False)
    checkpoints = memory(10)
    fit(opt, new_state(), source(batches), num_steps=13, checkpoints=checkpoints, progress=False)
    for target in (20, 30):
        checkpoints = memory(10, disk=checkpoints.disk, resume=True)
        resumed = fit(
            opt,
            new_state(),
            source(batches),
            num_steps=target,
            checkpoints=checkpoints,
            progress=False,
        )
    assert sorted(checkpoints.disk) == [10, 13, 20, 30]
    assert same(resumed.state, unbroken.state)


KILLED = list(itertools.product([of_list, of_grain], [5, 9, 10, 11, 19, 26]))


@pytest.mark.parametrize(
    ("source", "kill_at"), tiered(KILLED, lambda row: KILLED.index(row) % 4 == (row[0] is of_grain))
)
def test_a_run_killed_between_checkpoints_takes_the_same_steps_again(
    opt, new_state, batches, memory, same, metrics_at, source, kill_at
):
    """Steps since the last checkpoint are taken again, with the same batches and the same losses."""

    class Killed:
        def __init__(self):
            self.inner = iter(source(batches))
            if source is of_grain:
                self.get_state = self.inner.get_state
                self.set_state = self.inner.set_state
            self.left = kill_at

        def __iter__(self):
            return self

        def __next__(self):
            if not self.left:
                raise SystemExit
            self.left -= 1
            return next(self.inner)

    unbroken = fit(opt, new_state(), source(batches), num_steps=30, log_every=1, progress=False)
    checkpoints = memory(5)
    with pytest.raises(SystemExit):
        fit(opt, new_state(), Killed(), num_steps=30, checkpoints=checkpoints, progress=False)
    resumed_checkpoints = memory(5, disk=checkpoints.disk, resume=True)
    resumed = fit(
        opt,
        new_state(),
        source(batches),
        num_steps=30,
        log_every=1,
        checkpoints=resumed_checkpoints,
        progress=False,
    )
    assert same(resumed.state, unbroken.state)
    losses = metrics_at(resumed.history, "loss")
    assert min(losses) == (kill_at // 5 * 5 if kill_at % 5 else kill_at) + 1
    assert losses.items() <= metrics_at(unbroken.history, "loss").items()


BROKEN = list(itertools.product(["val", "error"], [1, 6, 9, 12, 13, 15, 18]))


@pytest.mark.parametrize(
    ("metric", "broken_at"), tiered(BROKEN, lambda row: BROKEN.index(row) % 7 == 3)
)
def test_early_stopping_resumes(opt, new_state, batches, memory, metrics_at, broken_at, metric):
    """The validation metric is lowest at step 9; the training metric stops wherever it stops."""
    options = {
        "evaluate": (lambda state: {"val": abs(int(state.step) - 9.5)}, 3),
        "log_every": 2,
        "early_stopping": EarlyStopping(metric, patience=3, min_delta=0.1),
        "progress": False,
    }
    unbroken = fit(opt, new_state(), of_list(batches), num_steps=40, **options)
    assert unbroken.stopped == "early"
    checkpoints = memory(4)
    fit(opt, new_state(), of_list(batches), num_steps=broken_at, checkpoints=checkpoints, **options)
    resumed_checkpoints = memory(4, disk=checkpoints.disk, resume=True)
    resumed = fit(
        opt, new_state(), of_list(batches), num_steps=40, checkpoints=resumed_checkpoints, **options
    )
    assert (resumed.step, resumed.stopped, resumed.best) == (unbroken.step, "early", unbroken.best)
    if metric == "val":
        assert (resumed.step, resumed.best) == (18, {"step": 9, "val": 0.5})


def test_resuming_what_was_stopped_early_takes_no_step(opt, new_state, batches, memory, same):
    rule = EarlyStopping("constant", patience=2)

    def run(checkpoints, rule):
        return fit(
            opt,
            new_state(),
            of_list(batches),
            num_steps=40,
            evaluate=lambda state: {"constant": 1.0},
            checkpoints=checkpoints,
            early_stopping=rule,
            progress=False,
        )

    first = run(checkpoints := memory(4), rule)
    assert (first.step, first.stopped) == (12, "early")
    second = run(memory(4, disk=checkpoints.disk, resume=True), rule)
    assert (second.step, second.stopped) == (12, "early")
    assert same(second.state, checkpoints.disk[12][0])
    patient = run(
        memory(4, disk=checkpoints.disk, resume=True), EarlyStopping("constant", patience=4)
    )
    assert (patient.step, patient.stopped) == (20, "early")


def test_other_metric_starts_again(opt, new_state, batches, memory, capsys):
    def evaluate(state):
        return {"a": 1.0, "b": -float(state.step)}

    def run(checkpoints, metric, target):
        return fit(
            opt,
            new_state(),
            of_list(batches),
            num_steps=target,
            evaluate=evaluate,
            checkpoints=checkpoints,
            early_stopping=EarlyStopping(metric, patience=2),
            progress=False,
        )

    run(checkpoints := memory(4), "a", 8)
    result = run(memory(4, disk=checkpoints.disk, resume=True), "b", 24)
    assert (result.stopped, result.best) == ("completed", {"step": 24, "b": -24.0})
    said = "Early stopping starts counting again: the checkpoint knows nothing of 'b' (min).\n"
    assert said in capsys.readouterr().err


def test_a_resumed_run_says_where_it_goes_on(opt, new_state, batches, memory, capsys):
    checkpoints = memory(5)
    first = fit(
        opt, new_state(), of_list(batches), num_steps=5, checkpoints=checkpoints, progress=False
    )
    assert capsys.readouterr().err == ""
    resumed_checkpoints = memory(5, disk=checkpoints.disk, resume=True)
    fit(
        opt,
        new_state(),
        of_list(batches),
        num_steps=10,
        checkpoints=resumed_checkpoints,
        progress=False,
    )
    assert (
        capsys.readouterr().err
        == "Resuming from step 5 in /runs/a, the data by drawing 5 batches.\n"
    )
    with pytest.warns(UserWarning, match="batch 9 is another"):  # grain's are shuffled
        fit(
            opt,
            new_state(),
            of_grain(batches),
            num_steps=15,
            checkpoints=resumed_checkpoints,
            progress=False,
        )
    assert (
        capsys.readouterr().err
        == "Resuming from step 10 in /runs/a, the data by drawing 10 batches.\n"
    )
    fit(
        opt,
        new_state(),
        of_grain(batches),
        num_steps=20,
        checkpoints=resumed_checkpoints,
        progress=False,
    )
    assert (
        capsys.readouterr().err
        == "Resuming from step 15 in /runs/a, the data from its saved state.\n"
    )
    later = fit(opt, first.state, of_list(batches), num_steps=25, progress=False)
    fit(
        opt,
        later.state,
        of_list(batches),
        num_steps=26,
        checkpoints=resumed_checkpoints,
        progress=False,
    )
    said = (
        "Going on from the state given (step 25); the last checkpoint, of step 20, is not newer.\n"
    )
    assert capsys.readouterr().err == said


def test_no_position_is_said(opt, new_state, batches, memory, capsys):
    checkpoints = memory(5, resume=True)
    state = fit(opt, new_state(), of_list(batches), num_steps=5, progress=False).state
    checkpoints.save(state, step=5, extra={})
    checkpoints.wait()
    message = (
        "fit: the data from its beginning: the checkpoint holds no position; rows are seen again.\n"
        "Fix: save with so.fit, or put the batches into their place before it is called."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$") as warned:
        fit(
            opt, new_state(), of_list(batches), num_steps=6, checkpoints=checkpoints, progress=False
        )
    assert warned[0].filename == __file__
    said = (
        "Resuming from step 5 in /runs/a, the data from its beginning: the checkpoint holds no"
        " position.\n"
    )
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "make", [list, iter, lambda batches: ({"b": [b], "n": 1} for b in batches)]
)
def test_data_in_another_order_warns(make):
    """Drawn from its beginning it would be other data.

    The same data is not warned of (and warnings are errors here).
    """
    stream = own_stream(make(range(9)))
    rows = np.random.default_rng(0).permutation(9).tolist()
    draw(stream, 5)
    put_back(make(range(9)), stream.position())
    message = (
        "fit: the batches do not come as in the run that saved the checkpoint: batch 4 is"
        " another.\nFix: shuffle by a fixed seed, the same each time the iterator is made, or give"
        " it get_state and set_state, as grain's have; or some rows are seen twice, and others not"
        " at all."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        put_back(make(rows), stream.position())


def test_the_state_passed_is_freed_before_restoring(opt, new_state, batches, memory):
    checkpoints = memory(5)
    fit(opt, new_state(), of_list(batches), num_steps=5, checkpoints=checkpoints, progress=False)
    resumed_checkpoints = memory(5, disk=checkpoints.disk, resume=True)
    state = new_state()
    freed = []
    restore = resumed_checkpoints.restore

    def watch(opt, *, step):
        freed.append(all(leaf.is_deleted() for leaf in state.params.values()))
        return restore(opt, step=step)

    resumed_checkpoints.restore = watch
    fit(opt, state, of_list(batches), num_steps=10, checkpoints=resumed_checkpoints, progress=False)
    assert freed == [True]


def test_a_used_folder_is_refused(opt, new_state, batches, memory):
    checkpoints = memory(5)
    state = fit(
        opt, new_state(), of_list(batches), num_steps=5, checkpoints=checkpoints, progress=False
    ).state
    message = (
        "fit: /runs/a already has checkpoints, the last of step 5.\n"
        "Fix: pass resume=True to so.Checkpoints to go on from there, or choose another folder."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit(
            opt,
            state,
            of_list(batches),
            num_steps=10,
            checkpoints=memory(5, disk=checkpoints.disk),
            progress=False,
        )
    assert not state.step.is_deleted()


def test_a_run_resumes_onto_another_strategy(opt, new_state, batches, memory, mesh_of, loss_fn):
    """The trajectory is the same on any mesh, up to summation order."""
    other = so.ddp(opt.wrapped, mesh_of(data=4), loss_fn)
    unbroken = fit(opt, new_state(), of_list(batches), num_steps=20, progress=False)
    checkpoints = memory(10)
    fit(opt, new_state(), of_list(batches), num_steps=10, checkpoints=checkpoints, progress=False)
    state = other.init({"w": np.zeros(4, np.float32), "b": np.zeros((), np.float32)})
    resumed_checkpoints = memory(10, disk=checkpoints.disk, resume=True)
    resumed = fit(
        other,
        state,
        of_list(batches),
        num_steps=20,
        checkpoints=resumed_checkpoints,
        progress=False,
    )
    for name, value in unbroken.state.params.items():
        np.testing.assert_allclose(resumed.state.params[name], value, rtol=2e-5)
