"""The daemon with the fault layer below it: ``python -m terracekv.tests.faulty_daemon``, as ``terracekv.daemon``.

Owns nothing. Started by ``harness.Daemon`` when its ``program`` says so; TERRACEKV_FAILPOINTS arms what shall happen.
"""

import sys

from terracekv.daemon.__main__ import main
from terracekv.tests.faults import FaultLayer

if __name__ == "__main__":
    FaultLayer()
    sys.exit(main())
