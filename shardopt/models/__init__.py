"""Models to train: examples that use the library, and that nothing in it imports but the command line."""

from shardopt.models import gpt, moe
from shardopt.models.gpt import sample
from shardopt.models.safetensors import export_safetensors, import_safetensors

__all__ = ["export_safetensors", "gpt", "import_safetensors", "moe", "sample"]
