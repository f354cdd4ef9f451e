"""`python -m shardopt.cli` is the same as `shardopt`."""

import sys

from shardopt.cli import main

sys.exit(main())
