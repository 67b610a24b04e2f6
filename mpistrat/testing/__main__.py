"""Command line: the launcher, as ``-n 3 -- -m pytest``, and the smoke test, as ``smoke``."""

import sys

if sys.argv[1:2] == ["smoke"]:
    from mpistrat.testing.smoke import main as smoke

    sys.exit(smoke(sys.argv[2:]))

from mpistrat.testing.launch import main

sys.exit(main())
