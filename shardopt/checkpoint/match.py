"""Does what is stored fit what is wanted? Every leaf that is missing, left over or different, in one error."""

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
    room = max(2, MAX_LISTED - len(different)) // (2 if missing and left_over else 1)
    listed += _listing(missing, stored, "missing from the checkpoint", room)
    listed += _listing(left_over, wanted, "left over in the checkpoint", room)
    counts = f"{plural(len(missing), 'leaf')} missing, {len(left_over)} left over, {len(different)} different"
    raise CheckpointError(complaint(who, f"{what} does not fit opt: {counts}.", listed, fix=_remedy(listed)))


def _listing(leaves: dict[LeafPath, Leaf], others: dict[LeafPath, Leaf], verdict: str, room: int) -> list[str]:
    """List leaf by leaf, or by ever larger containers of which the other side knows nothing, until there is room."""
    known = {path[:length] for path in others for length in range(len(path) + 1)}
    lines: list[str] = []
    for depth in range(max(map(len, leaves), default=0), -1, -1):
        groups: dict[LeafPath, list[LeafPath]] = {}
        for path in leaves:
            groups.setdefault(path[: _first_unknown(path, known) + depth], []).append(path)
        lines = [
            f"{show(members[0])}: {leaves[members[0]]}, {verdict}"
            if len(members) == 1
            else f"{show(group)}: {plural(len(members), 'leaf')} {verdict}"
            for group, members in groups.items()
        ]
        if len(lines) <= room:
            break
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
