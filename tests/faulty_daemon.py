"""The daemon with the fault layer below it: ``python -m terracekv.tests.faulty_daemon``, as ``terracekv.daemon``.

Owns nothing. Started by ``harness.Daemon`` when its ``program`` says so; TERRACEKV_FAILPOINTS arms what shall happen.
Without huge pages, of which the kernel makes one of 2 MiB now and then where a few KiB were in use: whoever measures
how memory grows would measure that.
"""

import ctypes
import sys

from terracekv.daemon.__main__ import main
from terracekv.tests.faults import FaultLayer

PR_SET_THP_DISABLE = 41

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    FaultLayer()
    sys.exit(main())
