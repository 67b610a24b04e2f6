"""Which of these tests one rank runs for all."""

from tests.helpers import serial

collect_ignore = serial("test_data_files.py", "test_measure.py")
