# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. Check your devices
#
# **The idea: check a machine before you believe it.** `shardopt verify` trains small models on your devices, and
# compares every device with one. This notebook runs the command and draws the result.
#
# It also runs on the free TPUs and GPUs of Kaggle and Colab. There, install shardopt in a cell of its own first:
# `%pip install "shardopt[tpu,plot]"`, or `gpu` for `tpu`. Set `MINUTES = 10`.

# %%
# %matplotlib inline
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

MINUTES = 1
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 100})

# %% [markdown]
# ## Run it
#
# The rows that matter most run first. When the time is over, one line counts the rows that did not begin.

# %%
output = Path(tempfile.mkdtemp()) / "verify.json"
command = [
    sys.executable,
    "-m",
    "shardopt.cli",
    "verify",
    "--minutes",
    str(MINUTES),
    "--output",
    str(output),
]
done = subprocess.run(command, capture_output=True, text=True)
print(done.stdout)

# %% [markdown]
# The exit code is 0 if all rows passed. It is 1 if a row failed, and 3 if no row failed but some are out of time.
# Without an accelerator you see eight simulated CPU devices.
#
# ## What passed, and what did not run

# %%
report = json.loads(output.read_text())
rows = report["rows"]
groups = list(dict.fromkeys(row["group"] for row in rows))
colours = {
    "passed": "#2a9d6f",
    "failed": "#d1495b",
    "did not fit": "#e9c46a",
    "not on this platform": "#9ca3af",
    "out of time": "#e5e7eb",
}
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
left = [0] * len(groups)
for status, colour in colours.items():
    counts = [
        sum(row["group"] == group and row["status"] == status for row in rows) for group in groups
    ]
    if any(counts):
        axes.barh(groups, counts, left=left, color=colour, label=status)
    left = [a + b for a, b in zip(left, counts, strict=True)]
axes.invert_yaxis()
axes.set(xlabel="rows", xlim=(0, max(left)))
axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
plt.show()

# %% [markdown]
# ## How far from one device
#
# Each training row has the largest difference of an update on any device, and a tolerance. The tolerance is the rounding
# of sums in another order. A sum that loses one device would be far to the right of the line.

# %%
trained = [
    row for row in rows if row["group"] == "training" and "update_difference" in row["numbers"]
]
figure, axes = plt.subplots(figsize=(7, 0.8 + 0.25 * len(trained)), layout="constrained")
for i, row in enumerate(trained):
    axes.plot(max(row["numbers"]["update_difference"], 1e-16), i, "o", color=colours[row["status"]])
    axes.plot(row["numbers"]["tolerance"], i, "|", color="#374151", markersize=12)
axes.set_yticks(range(len(trained)), [row["name"] for row in trained], fontsize=8)
axes.invert_yaxis()
axes.set_xscale("log")
axes.set_xlabel("difference from one device; the line is the tolerance")
plt.show()

# %% [markdown]
# ## Report it
#
# The file has the versions, the devices, and the numbers of all rows. Attach it to a report about a red row.

# %%
print(report["devices"], report["versions"], sep="\n")
