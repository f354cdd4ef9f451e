"""Example models that use the library; in the library only the command line imports them."""

from shardopt.models import gpt, moe
from shardopt.models.gpt import sample
from shardopt.models.safetensors import export_safetensors, import_safetensors

__all__ = ["export_safetensors", "gpt", "import_safetensors", "moe", "sample"]
