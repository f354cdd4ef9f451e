"""Example models that use the library, and open weights.

In the library only the commands import them.
"""

from shardopt.models import decoder, gpt, moe
from shardopt.models._export import export_safetensors
from shardopt.models._pretrained import Pretrained, from_pretrained
from shardopt.models._sampling import sample

__all__ = [
    "Pretrained",
    "decoder",
    "export_safetensors",
    "from_pretrained",
    "gpt",
    "moe",
    "sample",
]
