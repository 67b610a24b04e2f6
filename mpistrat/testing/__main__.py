"""Test launcher as a command: ``python -m mpistrat.testing -n 3 -- -m pytest``."""

import sys

from mpistrat.testing.launch import main

sys.exit(main())
