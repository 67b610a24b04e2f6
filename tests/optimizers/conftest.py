"""Which of these tests one rank runs for all."""

from tests.helpers import serial

collect_ignore = serial("test_kernels.py", "test_schedules.py")
