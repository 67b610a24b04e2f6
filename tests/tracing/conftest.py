"""Which of these tests one rank runs for all."""

from tests.helpers import serial

collect_ignore = serial("test_spans.py", "test_trace.py")
