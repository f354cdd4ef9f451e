"""Chooses the view of a loss: each device runs it on its own rows if a proof allows this.

Else it runs on the whole batch.
"""

import warnings
from collections.abc import Hashable
from typing import Literal, NamedTuple

import jax

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.core import PyTree, abstract, format_error
from shardopt.losses._batch_dims import FIX_ROWS, resized, row_counts, shown_leaves
from shardopt.losses._obstacle import Obstacle, find_obstacle
from shardopt.losses._per_row import PerRow


class ViewChoice(NamedTuple):
    """A view and the reason for it.

    Attributes:
      view: "per_device" or "global".
      reason: a sentence.
    """

    view: Literal["per_device", "global"]
    reason: str

    def __str__(self) -> str:
        """Return a line for the report."""
        return f"view: {self.view}: {self.reason}"


COST = (
    "The step is exact. It costs the collectives that the partitioner places for these operations,"
    " and an all-reduce where a reduce-scatter would do: docs/any_loss.md has the bytes."
)


class Views:
    """Chooses the view of each batch shape once, and remembers it.

    Args:
      config: the config of the step; for evaluation, its `of_evaluation`.
      training: whether the loss is differentiated, and gets a random key if it takes one.
    """

    def __init__(self, config: StrategyConfig, *, training: bool):
        self._config = config
        self._training = training
        self._choices: dict[Hashable, ViewChoice] = {}
        # keeps the layouts alive, so that no other layout gets the id of one of them
        self._layouts: list[Layout] = []
        self._warned = False

    @property
    def last(self) -> ViewChoice | None:
        """The newest choice; None before the first batch."""
        return next(reversed(self._choices.values()), None)

    def of(self, layout: Layout, batch: PyTree) -> Literal["per_device", "global"]:
        """Return the view for a batch of these shapes.

        Raises:
          NotSeparableError: if the loss is not proved to be a (weighted) mean over rows, and the
            strategy has no global view.
        """
        leaves, treedef = jax.tree.flatten(batch)
        shapes = tuple(
            (getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf))) for leaf in leaves
        )
        key = id(layout), treedef, shapes
        if key in self._choices:
            return self._choices[key].view
        # the proof traces the loss, and runs nothing
        with jax.check_tracer_leaks(False), jax.transfer_guard("allow"):
            choice = self._choose(layout, batch)
        self._choices[key] = choice
        self._layouts.append(layout)
        return choice.view

    def mixes_rows(self, layout: Layout, batch: PyTree, rows: int) -> bool:
        """Return whether a batch with `rows` rows in place of its own runs in the global view."""
        return self.of(layout, resized(self._config, abstract(batch), rows=rows)) == "global"

    def _choose(self, layout: Layout, batch: PyTree) -> ViewChoice:
        config = self._config
        if config.loss.view == "global":
            return ViewChoice("global", 'view="global" was asked for.')
        if len(row_counts(config, batch)) != 1:
            problem = "batch leaves do not agree on a number of rows."
            obstacle = Obstacle(problem, tuple(shown_leaves(config, batch)), f"{FIX_ROWS}.", "")
        else:
            obstacle = find_obstacle(config, layout, batch, training=self._training)
        if obstacle is None:
            if config.loss.separable:
                reason = (
                    "view='unproved' says that the loss is a mean over rows; this was not checked."
                )
            elif isinstance(config.loss.loss_fn, PerRow):
                reason = "so.per_row runs the loss of each row by itself."
            elif config.num_pieces == 1:
                reason = "one device runs the whole batch."
            else:
                reason = "the loss is proved to be a (weighted) mean over rows."
            return ViewChoice("per_device", reason)
        if not config.has_global_view:
            raise obstacle.error(config)
        if not self._warned:
            self._warned = True
            self._warn(obstacle)
        return ViewChoice("global", obstacle.problem)

    def _warn(self, obstacle: Obstacle) -> None:
        problem = f"the loss runs in the global view, once on the whole batch: {obstacle.problem}"
        fix = f"view='global' asks for it without this warning. For less traffic: {obstacle.fix}"
        lines = [*obstacle.lines, COST]
        warnings.warn(format_error(self._config.strategy, problem, lines, fix), stacklevel=2)
