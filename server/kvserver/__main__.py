"""``python -m kvserver``: the same as ``kvdepot serve``."""

import sys

from kvserver.serve import run

sys.exit(run(sys.argv[1:]))
