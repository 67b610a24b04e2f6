"""``python -m mpistrat.testing -n 3 --limit 600 -- -m pytest``: a program on several ranks."""

import sys

from mpistrat.testing.launch import main

sys.exit(main())
