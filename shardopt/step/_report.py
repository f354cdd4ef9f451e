"""The report of a strategy: where each leaf lives, at whose cost, and in which view the loss runs."""

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.losses._view import Views
from shardopt.mesh import on_mesh
from shardopt.partition import Report, report

UNDECIDED = "view: the first step chooses it."


def report_of(config: StrategyConfig, layout: Layout, views: Views) -> Report:
    """Return the placement of every leaf, within a replica."""
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
    owners, layouts = on_mesh(config.mesh, config.slots.update.describe)(config, layout)
    return placement_report._replace(
        view=UNDECIDED if views.last is None else str(views.last),
        owners=owners,
        layouts=layouts,
        rows=tuple(
            row._replace(params=spec(row.params), opt_state=spec(row.opt_state))
            for row in placement_report.rows
        ),
    )
