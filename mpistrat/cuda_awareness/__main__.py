"""Exchange of device memory by MPI, tried: ``python -m mpistrat.cuda_awareness``."""

import sys

from mpistrat.cuda_awareness.exchange import main

sys.exit(main())
