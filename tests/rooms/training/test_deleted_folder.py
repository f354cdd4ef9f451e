"""A checkpoint folder deleted at ten random moments of a run: the run goes on, and its end is
saved.
"""

import random
import shutil
import threading
import time

import pytest
from support.tiers import tiered

from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.checkpoint._read import restore
from shardopt.training._fit import fit


# orbax's, of writes that it gives up
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("draw", tiered(range(10), lambda draw: draw == 1))
def test_a_folder_deleted_under_a_run(opt, new_state, batches, same, tmp_path, caplog, draw):
    folder = tmp_path / "runs" / "a"
    doomed = folder.parent if draw % 2 else folder
    delay = random.Random(draw).uniform(0, 0.12)

    def delete():
        time.sleep(delay)
        shutil.rmtree(doomed, ignore_errors=True)  # files may come while it is being emptied

    def slowly(deleter):
        for drawn, batch in enumerate(batches):
            if drawn == 1:
                deleter.start()
            if drawn == 36:
                deleter.join()  # what is deleted after the last save is gone
            time.sleep(0.005)
            yield batch

    with Checkpoints(folder, every=4, keep=2) as checkpoints:
        data = slowly(threading.Thread(target=delete))
        result = fit(opt, new_state(), data, num_steps=40, checkpoints=checkpoints, progress=False)
    assert (result.step, result.stopped) == (40, "completed")
    assert any(
        f"{folder} was deleted while the job ran. It is made again for step" in line
        for line in caplog.messages
    )
    unbroken = fit(opt, new_state(), batches, num_steps=40, progress=False)
    assert same(result.state, unbroken.state)
    assert same(restore(folder, opt), unbroken.state)
