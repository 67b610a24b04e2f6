"""Trial exchange of device memory: ``python -m mpistrat.cuda_awareness``."""

import sys

from mpistrat.cuda_awareness.exchange import main

sys.exit(main())
