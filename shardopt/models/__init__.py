"""Models to train: users of the library, which nothing in it imports but the command line."""

from shardopt.models import gpt
from shardopt.models.safetensors import export_safetensors, import_safetensors
from shardopt.models.sampling import sample

__all__ = ["export_safetensors", "gpt", "import_safetensors", "sample"]
