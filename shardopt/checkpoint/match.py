"""Does what is stored fit what is wanted? Every leaf that is missing, left over or different, in one error."""

from collections import Counter
from typing import Any

from shardopt.checkpoint.leaves import Leaf, describe
from shardopt.checkpoint.paths import LeafPath, leaves_by_path, show
from shardopt.core.errors import MAX_LISTED, CheckpointError, complaint, plural


def check_match(who: str, what: str, stored: dict[LeafPath, Leaf], target: Any) -> None:
    """Refuse a target that differs from what is stored, before anything is read.

    Where there are more than eight, containers that are missing or left over as a whole are listed for their leaves.

    Args:
      who: the function that complains.
      what: what is stored, for instance "step 3 in /runs/a".
      stored: the records of the stored leaves.
      target: the wanted pytree of `jax.ShapeDtypeStruct`.

    Raises:
      CheckpointError: if a leaf is missing, left over, or of another shape or dtype.
    """
    wanted = {path: describe(leaf) for path, leaf in leaves_by_path(target).items()}
    missing = {path: leaf for path, leaf in wanted.items() if path not in stored}
    left_over = {path: leaf for path, leaf in stored.items() if path not in wanted}
    different = [path for path in wanted if path in stored and wanted[path] != stored[path]]
    if not (missing or left_over or different):
        return
    listed = [f"{show(path)}: the checkpoint holds {stored[path]}, opt wants {wanted[path]}" for path in different]
    listed += _listing(missing, left_over, stored, wanted, room=MAX_LISTED - len(different))
    counts = f"{plural(len(missing), 'leaf')} missing, {len(left_over)} left over, {len(different)} different"
    raise CheckpointError(complaint(who, f"{what} does not fit opt: {counts}.", listed, fix=_remedy(listed)))


def _listing(
    missing: dict[LeafPath, Leaf],
    left_over: dict[LeafPath, Leaf],
    stored: dict[LeafPath, Leaf],
    wanted: dict[LeafPath, Leaf],
    room: int,
) -> list[str]:
    """List what is missing and left over leaf by leaf, or by ever larger containers until there is room."""
    sides = [(missing, stored, "missing from the checkpoint"), (left_over, wanted, "left over in the checkpoint")]
    deepest = max(len(path) for path in stored | wanted)
    for depth in range(deepest, -1, -1):
        lines = [line for leaves, others, verdict in sides for line in _by_container(leaves, others, verdict, depth)]
        if len(lines) <= room:
            break
    return lines


def _by_container(leaves: dict[LeafPath, Leaf], others: dict[LeafPath, Leaf], verdict: str, depth: int) -> list[str]:
    """List the containers that lie `depth` levels below the largest ones of which the other side knows nothing."""
    known = {path[:length] for path in others for length in range(len(path) + 1)}
    groups = {path: path[: _first_unknown(path, known) + depth] for path in leaves}
    sizes = Counter(groups.values())
    lines = []
    for path, group in groups.items():
        if group == path:
            lines.append(f"{show(path)}: {leaves[path]}, {verdict}")
        elif group in sizes:
            lines.append(f"{show(group)}: {plural(sizes.pop(group), 'leaf')} {verdict}")
    return lines


def _first_unknown(path: LeafPath, known: set[LeafPath]) -> int:
    # The whole path counts as unknown: the other side may know it as a container, but not as a leaf.
    return next((length for length in range(1, len(path)) if path[:length] not in known), len(path))


def _remedy(offenders: list[str]) -> str:
    if all(offender.startswith(("opt_state/", "opt_state:")) for offender in offenders):
        return (
            "build opt with the optax chain that the checkpoint was saved with; or start another chain on its "
            "parameters: new_opt.init(restore(directory, old_opt).params)."
        )
    return "build opt for the model and the optax chain that the checkpoint was saved with."
