"""Example models that use the library; in the library only the commands import them."""

from shardopt.models import gpt, moe
from shardopt.models._safetensors import export_safetensors, import_safetensors
from shardopt.models._sampling import sample

__all__ = ["export_safetensors", "gpt", "import_safetensors", "moe", "sample"]
