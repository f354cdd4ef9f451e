"""Bubble rates that papers state, from the times of passes and messages that they state."""

import pytest

from shardopt.pipeline import schedules

pytestmark = pytest.mark.fast

# Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024): measured times of F, B, W and messages
# in ms (table 9) and bubble rates (table 5). Their authors print both, with the program that works
# one out of the other. The file is megatron/core/pipeline_parallel/efficiency.py in
# github.com/sail-sg/zero-bubble-pipeline-parallelism, commit f68d387.
ZERO_BUBBLE = [
    # stages, micro-batches, F, B, W, message, 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 0.1242, 0.0039),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444, 0.0674, 0.0026),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698, 0.1323, 0.0029),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559, 0.1045, 0.0022),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294, 0.0554, 0.0010),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672, 0.1397, 0.0066),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516, 0.1088, 0.0054),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266, 0.0576, 0.0028),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641, 0.1421, 0.0038),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490, 0.1106, 0.0029),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257, 0.0594, 0.0018),
]
NAMES = ("one_f_one_b", "zero_bubble", "zero_bubble_2")


def rate(schedule, forward, backward, weight, communication):
    """As the paper counts: of the stage that takes longest from its first pass to its last."""
    numbers = {
        "forward": forward,
        "backward": backward,
        "weight": weight,
        "communication": communication,
    }
    work = schedule.num_chunks * schedule.num_micro_batches * (forward + backward + weight)
    return 1 - work / max(schedule.stage_times(**numbers))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            marks=pytest.mark.slow if row[0] * row[1] > 4000 else (),
            id=f"{row[0]}-{row[1]}-{row[2]}",
        )
        for row in ZERO_BUBBLE
    ],
)
def test_schedules_have_the_bubbles_of_table_5_of_zero_bubble(row):
    stages, micro_batches, f, b, w, c, *stated = row
    rates = [rate(getattr(schedules, name)(stages, micro_batches), f, b, w, c) for name in NAMES]
    assert rates == pytest.approx(stated[:3], abs=1e-4)
