"""Which of these tests one rank runs for all."""

from tests.helpers import serial

collect_ignore = serial(
    "test_checkpoint.py",
    "test_directory.py",
    "test_generators.py",
    "test_json_text.py",
    "test_manager.py",
    "test_object_graph.py",
    "test_restore.py",
    "test_security.py",
    "test_share_out.py",
    "test_state_json.py",
    "test_validation.py",
    "test_writer.py",
)
