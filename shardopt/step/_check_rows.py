"""Checks that the batches of several processes fit together; each raises on all processes.

`calling` names the function that the user called.
"""

from collections.abc import Mapping, Sequence

from shardopt.core import plural, value_error
from shardopt.runtime._agreement import differing, groups, process_text

_SPLIT = (
    "torch's DistributedSampler, datasets' split_dataset_by_node and grain's ShardByJaxProcess"
    " give each process its own"
)

Processes = Sequence[int]
Shares = Mapping[int, tuple[int, ...]]
"""Process -> the shares of the rows that its devices hold."""


def check_claims(claims: Sequence[str], processes: Processes) -> None:
    """Refuse, by a ValueError, a global batch on some processes and other rows on others."""
    if len(set(claims)) <= 1:
        return
    meanings = {
        "process": "its own rows",
        "global": "the global batch (so.GlobalRows)",
        "placed": "a jax.Array on the devices of all processes",
        "end": "no batch: its batches ended",
    }
    listed = [f"{who}: {meanings[claim]}" for claim, who in groups(claims, processes).items()]
    fix = "let all processes pass their batches in the same way, and the same number of them."
    raise value_error("the batches do not fit together.", listed, fix)


def check_forms(forms: Sequence[Sequence[str]], processes: Processes, *, is_global: bool) -> None:
    """Refuse batches with other leaves, shapes, dtypes or numbers on some processes.

    Args:
      forms: the lines of `HostBatch.form`, by process.
      processes: the processes.
      is_global: whether each process passes the global batch.

    Raises:
      ValueError: if the forms differ.
    """
    listed = []
    for line in dict.fromkeys(line for form in forms for line in form):
        having = [process for process, form in zip(processes, forms, strict=True) if line in form]
        if len(having) < len(processes):
            listed.append(f"{process_text(having)}: {line}")
    if not listed:
        return
    problem = "the batches of the processes have different leaves, shapes or dtypes."
    fix = "pass the same leaves, dtypes, numbers and lengths of sequences on all processes."
    if is_global:
        problem = "so.GlobalRows says that all processes pass the same batch, but these differ."
        fix = "pass the same batch on each, or its own rows on each: leave so.GlobalRows out."
    raise value_error(problem, listed, fix)


def check_global(digests: Sequence[Mapping[str, str]], processes: Processes) -> None:
    """Refuse, by a ValueError, a global batch whose values differ between processes."""
    listed = _differing(digests, processes)
    if listed:
        problem = "so.GlobalRows says that all processes pass the same batch, but these differ."
        fix = (
            "let each process pass its own rows, without so.GlobalRows; or give all processes the"
            " same seed and the same order of files."
        )
        raise value_error(problem, listed, fix)


def check_own_rows(
    digests: Sequence[Mapping[str, str]], processes: Processes, shares: Shares
) -> None:
    """Refuse rows of the processes that do not add up to a global batch.

    Args:
      digests: `HostBatch.digests`, by process.
      processes: the processes.
      shares: the shares of the rows that each process holds.

    Raises:
      ValueError: if processes with other shares pass the same rows. If processes with the same
        shares pass other rows. If a leaf that all rows share differs.
    """
    shared = [_part(digest, "shared") for digest in digests]
    listed = _differing(shared, processes)
    if listed:
        fix = "pass the same values on all processes, or name the dim of rows in batch_dims."
        raise value_error("leaves that all rows share differ between processes.", listed, fix)
    of_process = {
        process: tuple(sorted(_part(digest, "rows").items()))
        for process, digest in zip(processes, digests, strict=True)
    }
    leaders = []
    for held, process_names in groups(
        [shares[process] for process in processes], processes
    ).items():
        members = [process for process in processes if shares[process] == held]
        if len({of_process[process] for process in members}) > 1:
            problem = (
                f"{process_names} hold the same rows of the mesh, since it splits parameters over"
                " them, but they passed different rows."
            )
            fix = (
                "let them load the same rows; or pass the global batch on all processes:"
                " so.GlobalRows(batches)."
            )
            raise value_error(problem, fix=fix)
        if of_process[min(members)]:
            leaders.append(min(members))
    copies = groups([of_process[process] for process in leaders], leaders)
    if len(copies) < len(leaders):
        repeated = [names for names in copies.values() if names.startswith("processes")]
        problem = "processes passed the same rows: each row would count more than once."
        fix = (
            f"split the data over the processes ({_SPLIT}). If each process passes the global"
            " batch, wrap the batches: so.GlobalRows(batches)."
        )
        raise value_error(problem, repeated, fix)


def check_shares(shares: Shares) -> None:
    """Refuse, by a ValueError, a mesh on which two processes hold some common shares of the rows."""
    for first, held in shares.items():
        for second, others in shares.items():
            if held != others and set(held) & set(others):
                problem = (
                    f"processes {first} and {second} hold some of the same rows of this mesh, so"
                    " neither can pass rows of its own."
                )
                fix = "pass the global batch on each process: so.GlobalRows(batches)."
                raise value_error(problem, fix=fix)


def uneven_rows_error(rows: Mapping[int, int], pieces: int) -> ValueError:
    """Return the error of rows that do not add up to a number that the devices divide."""
    listed = [f"process {process}: {plural(count, 'row')}" for process, count in rows.items()]
    problem = (
        f"the rows of the processes add up to {sum(rows.values())}, which the {pieces} devices and"
        " micro-batches do not divide."
    )
    fix = (
        "leave the last rows of an epoch out (drop_last=True of a loader), or give each process as"
        " many rows as it has pieces."
    )
    return value_error(problem, listed, fix)


def _differing(digests: Sequence[Mapping[str, str]], processes: Processes) -> list[str]:
    """Return a line for each leaf whose digest is not the same on all processes."""
    return [
        f"{name.partition(' ')[2]}: differs between {' and '.join(by_value.values())}"
        for name, by_value in differing(digests, processes)
    ]


def _part(digests: Mapping[str, str], kind: str) -> dict[str, str]:
    return {name: value for name, value in digests.items() if name.partition(" ")[0] == kind}
