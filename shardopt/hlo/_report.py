"""The collectives of a program as a table: filters and sums."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from jax.sharding import Sharding

from shardopt.core import plural
from shardopt.core._tables import aligned, name_end
from shardopt.hlo._collective import Collective
from shardopt.hlo.proof import Proof, prove
from shardopt.hlo.proof._prove import Source

_Key = TypeVar("_Key")


class Traffic(NamedTuple):
    """The traffic of some collectives in one execution of the program, per device.

    All attributes are None if the trip count of a loop is unknown.

    Attributes:
      calls: calls, multiplied by the trip counts of loops.
      bytes: whole buffers (see `Collective.bytes`) times calls.
      wire_bytes: bytes that a device sends in ring collectives, times calls.
    """

    calls: int | None
    bytes: int | None
    wire_bytes: int | None


class Audit(NamedTuple):
    """The collectives of one compiled program. `print` shows them as a table.

    Attributes:
      collectives: the collectives in program order, without collectives whose groups have a single
        member.
      mesh_shape: mesh axis to size.
      name: name of the compiled module.
      unread: names of the instructions that start work on a TPU's SparseCore, if no collective was
        found in this work. Their traffic is unknown, and no sum contains it.
      source: the program, for `prove`.
    """

    collectives: tuple[Collective, ...]
    mesh_shape: dict[str, int]
    name: str
    unread: tuple[str, ...] = ()
    source: Source | str = ""

    def prove(
        self,
        *,
        inputs: Sequence[Sharding | str] | None = None,
        outputs: Sequence[Sharding | str] | None = None,
    ) -> Proof:
        """Prove that the program computes the program that XLA was given; see `so.hlo.prove`.

        Args:
          inputs: one sharding per parameter of the program; by default the shardings of the
            compiled program or text.
          outputs: one sharding per array of the result; needed if the audit is of a text.

        Returns:
          A `Proof`, whose verdict is "proved", "derived", "agrees", "unknown" or "wrong". Only an
          audit of a function or of a `Lowered` knows the program that XLA was given; an audit of a
          `Compiled` or a text is at most "derived".

        Raises:
          ValueError: if the audit is of a text that does not contain the shardings of its
            parameters or results.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from jax.sharding import NamedSharding, PartitionSpec as P
          >>> import shardopt as so
          >>> mesh = so.make_mesh(data=8)
          >>> x = jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, P("data")))
          >>> so.hlo.audit(jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P())), x).prove().verdict
          'proved'
        """
        return prove(self.source, inputs=inputs, outputs=outputs, mesh=self.mesh_shape)

    @property
    def total(self) -> Traffic:
        """The traffic of all collectives together."""
        return _traffic(self.collectives)

    @property
    def total_wire_bytes(self) -> int | None:
        """The bytes that a device sends in one execution.

        None if the trip count of a loop is unknown.
        """
        return self.total.wire_bytes

    def of(
        self,
        kind: str | None = None,
        axis: str | None = None,
        in_loop: bool | None = None,
        min_bytes: int = 0,
    ) -> "Audit":
        """Return an audit of the collectives that match all arguments.

        Args:
          kind: kind of collective, such as "all-reduce".
          axis: a mesh axis among the collective's axes.
          in_loop: True for collectives in a loop, False for collectives outside of loops.
          min_bytes: skip collectives with smaller buffers, such as the reduction of the loss.
        """
        matching = tuple(
            collective
            for collective in self.collectives
            if kind in (None, collective.kind)
            and (axis is None or axis in (collective.axes or ()))
            and in_loop in (None, collective.in_loop)
            and collective.bytes >= min_bytes
        )
        return self._replace(collectives=matching)

    def by_axis(self) -> dict[tuple[str, ...] | None, Traffic]:
        """Return the traffic by the mesh axes that the collectives span."""
        return _grouped(self.collectives, lambda collective: collective.axes)

    def by_kind(self) -> dict[str, Traffic]:
        """Return the traffic by kind of collective."""
        return _grouped(self.collectives, lambda collective: collective.kind)

    def __str__(self) -> str:
        """Return the table: one line per instruction, then the sums by axes, then the `unread`
        starts.
        """
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh_shape.items())
        title = f"{self.name}: {len(self.collectives)} collectives on {mesh or 'one device'}"
        unread = [
            f"{name}: starts work on the SparseCore in which no collective was found"
            for name in self.unread
        ]
        return "\n".join([title, *_lines(self.collectives), *_sums(self.by_axis()), *unread])


def _traffic(collectives: Iterable[Collective]) -> Traffic:
    calls = 0
    size = 0
    wire = 0
    for collective in collectives:
        if collective.calls is None:
            return Traffic(None, None, None)
        calls = calls + collective.calls
        size = size + collective.bytes * collective.calls
        wire = wire + collective.wire_bytes * collective.calls
    return Traffic(calls, size, wire)


def _grouped(
    collectives: Iterable[Collective], key: Callable[[Collective], _Key]
) -> dict[_Key, Traffic]:
    members: dict[_Key, list[Collective]] = {}
    for collective in collectives:
        members.setdefault(key(collective), []).append(collective)
    return {name: _traffic(group) for name, group in members.items()}


def _axes_text(axes: tuple[str, ...] | None) -> str:
    """Return `replica x data`, or `mixed` if the groups are neither a product of axes nor parts of
    one axis.
    """
    return "mixed" if axes is None else " x ".join(axes)


def _lines(collectives: tuple[Collective, ...]) -> list[str]:
    """Return the lines of the table, with numbers aligned to the right."""
    if not collectives:
        return []
    rows = [
        ["kind", "axes", "bytes a call", "calls", "wire bytes", "loops", "notes", "where"],
        *map(_row, collectives),
    ]
    return aligned(rows, lambda _, cell: cell.replace(",", "").isdigit() or cell == "?")


def _row(collective: Collective) -> list[str]:
    notes = {
        "branch": collective.conditional,
        "async": collective.asynchronous,
        f"a step of {collective.group_size} along it": collective.part,
        f"groups {collective.groups}": collective.groups and not collective.part,
    }
    return [
        collective.kind,
        _axes_text(collective.axes),
        _number(collective.bytes),
        _number(collective.calls),
        _number(_traffic([collective]).wire_bytes),
        "x".join(map(_number, collective.loops)) or "-",
        ", ".join(note for note, applies in notes.items() if applies) or "-",
        name_end(collective.op_name or collective.name),
    ]


def _sums(by_axis: Mapping[tuple[str, ...] | None, Traffic]) -> list[str]:
    lines = []
    for axes, traffic in by_axis.items():
        calls = "? calls" if traffic.calls is None else plural(traffic.calls, "call")
        lines.append(
            f"{_axes_text(axes)}: {_number(traffic.wire_bytes)} bytes sent per device in {calls}"
        )
    if any(traffic.calls is None for traffic in by_axis.values()):
        lines.append("?: in a loop whose trip count the program does not tell")
    return lines


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"
