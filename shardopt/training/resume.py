"""Checkpoints at both ends of a run: where it begins, what it keeps, and that all is written when it ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from shardopt.core import early_stopping as stopping
from shardopt.core.early_stopping import EarlyStopping, StoppingState
from shardopt.core.errors import CheckpointError, NonFiniteLossError, complaint
from shardopt.training.position import Stream


def begin(
    opt: Any, state: Any, stream: Stream, rule: EarlyStopping | None, checkpoints: Any, say: Callable[[str], None]
) -> tuple[Any, StoppingState]:
    """Return the state to start from and what early stopping remembers; put the stream into its place.

    A checkpoint is taken up if `checkpoints.resume` is set and it is newer than the state, whose memory is then freed
    first. What is done is said.

    Raises:
      ValueError: if the folder has checkpoints and `checkpoints.resume` is not set, or the batches cannot be put back.
    """
    if checkpoints is None or (latest := checkpoints.latest()) is None:
        return state, StoppingState()
    if not checkpoints.resume:
        what = f"{checkpoints.directory} already has checkpoints, the last of step {latest}."
        fix = "pass resume=True to so.Checkpoints to go on from there, or choose another folder."
        raise ValueError(complaint("fit", what, fix=fix))
    step = int(state.step)
    if latest <= step:
        say(f"Going on from the state given (step {step}); the last checkpoint, of step {latest}, is not newer.")
        return state, StoppingState()
    free(state)
    state, extra = checkpoints.restore(opt, step=latest)
    return state, _take_up(extra or {}, stream, rule, f"Resuming from step {latest} in {checkpoints.directory}", say)


def pack(stream: Stream, rule: EarlyStopping | None, state: StoppingState) -> dict[str, Any]:
    """Return what a checkpoint keeps besides the train state, as JSON."""
    return {"batches": stream.position(), "early_stopping": None if rule is None else stopping.to_json(rule, state)}


@contextmanager
def written_out(checkpoints: Any) -> Iterator[None]:
    """Wait at the end for the checkpoint that is still being written, also where an error ends the run."""
    try:
        yield
    except BaseException as error:
        # Waiting is something that all processes do together: after an error that only one of them has it would
        # wait for ever. A loss is the same on all.
        together = jax.process_count() == 1 or isinstance(error, NonFiniteLossError)
        if checkpoints is not None and together:
            try:
                checkpoints.wait()
            except CheckpointError as failure:
                error.add_note(str(failure))  # what went wrong first must stay in front
        raise
    if checkpoints is not None:
        checkpoints.wait()


def free(state: Any) -> None:
    """Give back the device memory of a state that is not needed any more, so that two are never held."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


def _take_up(
    extra: dict[str, Any], stream: Stream, rule: EarlyStopping | None, headline: str, say: Callable[[str], None]
) -> StoppingState:
    position, saved = extra.get("batches"), extra.get("early_stopping")
    how = (
        "the data from its beginning: the checkpoint holds no position"
        if position is None
        else stream.restore(position)
    )
    say(f"{headline}, {how}.")
    if rule is None:
        return StoppingState()
    state = None if saved is None else stopping.from_json(rule, saved)
    if state is None:
        say(f"Early stopping starts counting afresh: the checkpoint knows nothing of {rule.metric!r} ({rule.mode}).")
    return state or StoppingState()
