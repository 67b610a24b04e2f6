"""Which of these tests one rank runs for all."""

from tests.helpers import serial

collect_ignore_glob = serial("test_*.py")
