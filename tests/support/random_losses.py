"""Random losses over the primitives that people use, drawn from a seed, with their source.

A program is a list of statements. A statement is a template with placeholders, which are filled
with earlier values of a shape that fits. About half of the templates keep rows apart. Every second
program has one or two of the other templates.

Placeholders ("picked" is the value that the last {r} was filled with):

- {r}: rows of any shape
- {r1} {r2} {r3}: rows with 1, 2 or 3 dims
- {s}: a value with the shape of the picked value
- {q}: one number per row, which broadcasts against the picked value
- {i}: an integer per row
- {m}: a mean over rows
- {o}: any value but a mean
- {F}: the size of the last dim of the picked value
- {v}: a parameter of this size
- {w}: a matrix parameter with this number of rows
- {j}: an index of this dim
- {c} {n}: a number, a small integer
- {rest}: the sizes of the dims after rows
"""

import functools
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so
from support import random_templates
from support.piecewise import as_users_have_it

LONGEST = 12
"""The number of rows of the largest batch, and the length of tables."""


class Program(NamedTuple):
    """A random loss.

    Attributes:
      seed: the seed that it was drawn from.
      source: the Python source of the loss.
      loss_fn: `loss_fn(params, batch)`.
      params: the parameters of the loss.
      batch: the whole batch.
      pieces: the number of pieces that the batch is cut into.
    """

    seed: int
    source: str
    loss_fn: Callable[..., Any]
    params: dict[str, np.ndarray]
    batch: dict[str, np.ndarray]
    pieces: int

    def __str__(self) -> str:
        rows, features = self.batch["x"].shape
        return (
            f"seed {self.seed}, {rows} rows in {self.pieces} pieces, {features}"
            f" features:\n{self.source}"
        )


class Value(NamedTuple):
    """The value that a statement computes.

    Attributes:
      name: its name in the source.
      shapes: its shapes for the whole batch and for a piece.
      kind: "rows" if dim 0 holds the rows, "mean" for a mean over rows, "odd" for anything else.
      is_float: whether it can be differentiated.
    """

    name: str
    shapes: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
    kind: str
    is_float: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0].shape


def random_loss(seed: int) -> Program:
    """Return the program of a seed, which is the same each time."""
    draw = random.Random(seed)
    rows, pieces = draw.choice([(8, 2), (8, 4), (12, 2), (12, 4)])
    F, G, T = (draw.choice([2, 3, 4]) for _ in range(3))
    numbers = np.random.default_rng(seed)
    batch = {
        "x": numbers.normal(size=(rows, F)),
        "y": numbers.normal(size=(rows, G)),
        "seq": numbers.normal(size=(rows, T, F)),
        "label": numbers.integers(0, 3, rows),
        "mask": (
            np.ones(rows)
            if draw.random() < 0.3
            else (numbers.uniform(size=rows) < 0.7).astype(float) + 0.0
        ),
    }
    sizes = {"w": (4, 4), "v": (LONGEST,), "table": (LONGEST, 4), "pos": (LONGEST, 4)}
    params = {name: 0.7 * numbers.normal(size=size) for name, size in sizes.items()}
    with as_users_have_it():
        source = _Writer(draw, params, batch, pieces).write()
    scope = dict(SCOPE)
    exec(source, scope)
    return Program(seed, source, scope["loss"], params, batch, pieces)


class _Writer:
    """Writes one program, statement by statement.

    It leaves out statements that jax cannot trace.
    """

    def __init__(self, draw: random.Random, params: dict, batch: dict, pieces: int):
        self.draw = draw
        self.lines = []
        self.values = []
        rows = len(batch["x"])
        self.rows = rows, rows // pieces

        def abstract(x, rows):
            return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

        self.params = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
        for name, x in batch.items():
            shapes = tuple(abstract(x, rows) for rows in self.rows)
            self.values.append(Value(name, shapes, "rows", x.dtype == np.float64))
        self.last = self.values[0]
        self.picked: Value | None = None

    def write(self) -> str:
        draw = self.draw
        hostile = draw.choices([0, 1, 2], [0.62, 0.28, 0.1])[0]
        plan = [random_templates.ROWWISE] * draw.randint(1, 5)
        plan += [random_templates.MEANS] * draw.choice([0, 0, 1])
        for _ in range(hostile):
            plan.insert(draw.randint(0, len(plan)), random_templates.MIXING)
        if draw.random() < 0.85:
            plan.insert(draw.randint(0, 1), {"parameters": random_templates.ROWWISE["parameters"]})
        for groups in plan:
            self.statement(groups)
        ending = (
            random_templates.WRONG_ENDINGS if draw.random() < 0.12 else random_templates.ENDINGS
        )
        loss = self.ending(ending)
        if draw.random() < 0.25:
            wrong = draw.random() < 0.3
            metrics = random_templates.WRONG_METRICS if wrong else random_templates.METRICS
            metric = self.ending(metrics)
            loss = f'{loss}, {{"metric": {metric}}}'
        head = ["def loss(params, batch):", '    B = batch["x"].shape[0]']
        head += [f'    {name} = batch["{name}"]' for name in ("x", "y", "seq", "label", "mask")]
        return "\n".join(
            [*head, *(f"    {line}" for line in self.needed(loss)), f"    return {loss}", ""]
        )

    def needed(self, loss: str) -> list[str]:
        """Return the statements that the loss follows from."""
        names = _names(loss)
        lines = []
        for line in reversed(self.lines):
            name, expression = line.split(" = ", 1)
            if name in names:
                lines.append(line)
                names |= _names(expression)
        return lines[::-1]

    def statement(self, groups: dict[str, list[str]]) -> None:
        for attempt in range(40):
            template = self.draw.choice(groups[self.draw.choice(list(groups))])
            expression = self.filled(template)
            if expression is None or (attempt < 30 and self.last.name not in _names(expression)):
                continue
            shapes = self.shapes(expression)
            if not shapes:
                continue
            kind = (
                "mean"
                if groups is random_templates.MEANS and not shapes[0].shape
                else self.kind(shapes)
            )
            is_float = bool(jnp.issubdtype(shapes[0].dtype, jnp.floating))
            value = Value(f"v{len(self.lines)}", shapes, kind, is_float)
            self.lines.append(f"{value.name} = {expression}")
            self.values.append(value)
            self.last = value if is_float else self.last
            return

    def ending(self, templates: list[str]) -> str:
        for attempt in range(80):
            template = self.draw.choice(templates)
            expression = self.filled(template)
            if expression is None or (attempt < 60 and self.last.name not in _names(expression)):
                continue
            if self.shapes(expression, as_result=True):
                return expression
        return "jnp.mean(x)"

    def kind(self, shapes: Any) -> str:
        sizes = [shape.shape for shape in shapes]
        is_rows = all(size[:1] == (rows,) for size, rows in zip(sizes, self.rows, strict=True))
        return "rows" if is_rows and sizes[0][1:] == sizes[1][1:] else "odd"

    def shapes(self, expression: str, as_result: bool = False) -> Any:
        """Return the shapes of an expression for the whole batch and for a piece.

        None if jax cannot trace it.
        """
        code = compile(expression, "<template>", "eval")
        shapes = []
        for i, rows in enumerate(self.rows):
            inputs = {
                value.name: value.shapes[i]
                for value in self.values
                if value.name in _names(expression)
            }

            def run(params, inputs, rows=rows):
                scope = SCOPE | inputs | {"params": params, "B": rows}
                return eval(code, scope)

            try:
                shape = jax.eval_shape(run, self.params, inputs)
            except Exception:
                return None
            leaves = jax.tree.leaves(shape)
            if as_result:
                if any(leaf.shape for leaf in leaves):
                    return None
            elif (
                not hasattr(shape, "shape") or shape.size == 0 or shape.size > 600 or shape.ndim > 4
            ):
                return None
            shapes.append(shape)
        return tuple(shapes)

    def filled(self, template: str) -> str | None:
        """Return a template with its placeholders filled, or None if nothing fits."""
        filling: dict[str, str] = {}
        self.picked = None
        for token in re.findall(r"\{(\w+)\}", template):
            if token not in filling:
                text = self.fill(token)
                if text is None:
                    return None
                filling[token] = text
        return re.sub(r"\{(\w+)\}", lambda match: filling[match[1]], template)

    def fill(self, token: str) -> str | None:
        draw = self.draw
        picked = self.picked
        floats = [value for value in self.values if value.is_float]
        rows = [value for value in floats if value.kind == "rows"]
        odd_values = [value for value in floats if value.kind == "odd" and value.shape]
        if token in ("c", "n"):
            return (
                str(round(draw.uniform(-2, 2), 2))
                if token == "c"
                else str(draw.choice([1, 2, 3, 4]))
            )
        if token == "i":
            return draw.choice(
                ["label", "label", "(label + 1) % 3", "jnp.arange(B) % 3", "jnp.argmax(x, -1)"]
            )
        if token == "m":
            return self.choose_name(
                [value for value in floats if value.kind == "mean" and not value.shape]
            )
        if token == "o":
            return self.choose_name([value for value in floats if value.kind != "mean"])
        if token in ("r", "r1", "r2", "r3"):
            fits = [
                value
                for value in rows + odd_values
                if token == "r" or len(value.shape) == int(token[1])
            ]
            return self.choose_name(fits, becomes_last=True)
        if picked is None:
            return None
        if token == "s":
            return self.choose_name(
                [value for value in rows + odd_values if value.shape == picked.shape]
            )
        if token == "q":
            per_row = draw.choice([value.name for value in rows if len(value.shape) == 1])
            return per_row + f"[:, {', '.join(['None'] * (len(picked.shape) - 1))}]" * (
                len(picked.shape) > 1
            )
        if token == "rest":
            return "".join(f", {size}" for size in picked.shape[1:])
        last = picked.shape[-1] if len(picked.shape) > 1 else None
        if last is None:
            return None
        texts = {"F": str(last), "v": f'params["v"][:{last}]', "j": str(draw.randrange(last))}
        texts["w"] = f'params["w"][:{last}, :{draw.choice([2, 3, 4])}]'
        return texts[token]

    def choose_name(self, values: list[Value], *, becomes_last: bool = False) -> str | None:
        """Return the name of one of several values: the last value of the program in most cases."""
        if not values:
            return None
        value = (
            self.last
            if self.last in values and self.draw.random() < 0.75
            else self.draw.choice(values)
        )
        if becomes_last:
            self.picked = value
        return value.name


def _names(expression: str) -> set[str]:
    return set(re.findall(r"[a-z]\w*", expression))


@jax.custom_vjp
def halves_gradient(x):
    return x


halves_gradient.defvjp(lambda x: (x, None), lambda _, ct: (0.5 * ct,))


@jax.custom_vjp
def gradient_by_value(x):
    return jnp.sin(x)


gradient_by_value.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.tanh(x),))


@jax.custom_vjp
def gradient_over_count(x):
    return x


gradient_over_count.defvjp(lambda x: (x, None), lambda _, ct: (ct / ct.shape[0],))


@jax.custom_vjp
def gradient_less_mean(x):
    return x


gradient_less_mean.defvjp(lambda x: (x, None), lambda _, ct: (ct - ct.mean(0),))


@jax.custom_vjp
def sign_of_gradient(x):
    return x


sign_of_gradient.defvjp(lambda x: (x, None), lambda _, ct: (jnp.sign(ct),))


@jax.custom_vjp
def clipped_gradient(x):
    return x


clipped_gradient.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.05, 0.05),))


@jax.custom_vjp
def gradient_by_last_row(x):
    return x


gradient_by_last_row.defvjp(lambda x: (x, x), lambda x, ct: (ct * x[-1:],))


@jax.custom_vjp
def shifted_gradient(x):
    return x


shifted_gradient.defvjp(lambda x: (x, None), lambda _, ct: (ct + 1.0,))


@jax.custom_jvp
def slope_of_its_own(x):
    return jnp.sin(x)


slope_of_its_own.defjvp(
    lambda primals, tangents: (jnp.sin(primals[0]), 0.3 * tangents[0] * primals[0])
)


@jax.custom_jvp
def slope_over_count(x):
    return jnp.sin(x)


slope_over_count.defjvp(
    lambda primals, tangents: (jnp.sin(primals[0]), tangents[0] / primals[0].shape[0])
)


@jax.custom_jvp
def slope_less_mean(x):
    return x


slope_less_mean.defjvp(lambda primals, tangents: (primals[0], tangents[0] - tangents[0].mean(0)))


@jax.custom_jvp
def slope_by_mean(x):
    return x


slope_by_mean.defjvp(
    lambda primals, tangents: (primals[0], tangents[0] * jnp.tanh(primals[0]).mean(0))
)


@jax.jit
def jitted_norm(x):
    return x / jnp.sqrt(1 + jnp.sum(x**2, -1, keepdims=True))


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-2)


TABLE = np.random.default_rng(7).normal(size=(LONGEST, 4))
HELPERS = [
    halves_gradient,
    gradient_by_value,
    gradient_over_count,
    gradient_less_mean,
    sign_of_gradient,
    clipped_gradient,
]
HELPERS += [
    gradient_by_last_row,
    shifted_gradient,
    slope_of_its_own,
    slope_over_count,
    slope_less_mean,
    slope_by_mean,
]
HELPERS += [jitted_norm, layer_norm]
SCOPE = {
    "jax": jax,
    "jnp": jnp,
    "np": np,
    "so": so,
    "optax": optax,
    "functools": functools,
    "TABLE": TABLE,
}
SCOPE |= {getattr(helper, "__name__", ""): helper for helper in HELPERS}
