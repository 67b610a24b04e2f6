"""``python -m mpistrat.cuda_awareness``: try an exchange of device memory."""

import sys

from mpistrat.cuda_awareness.exchange import main

sys.exit(main())
