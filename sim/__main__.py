"""``python -m sim`` is ``greenroom sim``."""

import sys

from sim.run import main

sys.exit(main(sys.argv[1:]))
