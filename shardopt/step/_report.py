"""The report of a strategy: where each leaf lives, at whose cost, and the view of the loss."""

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.losses._view import Views
from shardopt.mesh import on_mesh
from shardopt.partition import Owners, Report, report

UNDECIDED = "view: the first step chooses it."


class Reports:
    """The reports of a strategy.

    Owners of matrices are found in the trace of the update, once for a layout.

    Args:
      config: of the strategy.
      views: chooses the view of each batch shape.
    """

    def __init__(self, config: StrategyConfig, views: Views):
        self._config = config
        self._views = views
        # by id: the layouts are kept alive with them
        self._owners: dict[int, tuple[Layout, Owners | None]] = {}

    def of(self, layout: Layout) -> Report:
        """Return the placement of every leaf, within a replica."""
        if id(layout) not in self._owners:
            describe = on_mesh(self._config.mesh, self._config.slots.update.describe)
            self._owners[id(layout)] = layout, describe(self._config, layout)
        _, owners = self._owners[id(layout)]
        return _report_of(self._config, layout, self._views, owners)


def _report_of(
    config: StrategyConfig, layout: Layout, views: Views, owners: Owners | None
) -> Report:
    placement_report = report(
        layout.plans,
        layout.specs,
        layout.abstract,
        mesh=config.mesh,
        params_split=config.placement.params,
        state_split=config.placement.opt_state,
        min_shard_elements=config.layout.min_shard_elements,
    )
    spec = config.home.spec
    return placement_report._replace(
        view=UNDECIDED if views.last is None else str(views.last),
        owners=owners,
        rows=tuple(
            row._replace(params=spec(row.params), opt_state=spec(row.opt_state))
            for row in placement_report.rows
        ),
    )
