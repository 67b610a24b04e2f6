"""Atomic files: what they replace, whom they let read, and what they do not follow."""

import os
import stat

from mpistrat.system.files import write_atomically


def test_a_link_at_the_old_temporary_name_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    target = tmp_path / "flight.rank0.json"
    (tmp_path / f".{target.name}.{os.getpid()}.tmp").symlink_to(victim)
    write_atomically(target, "record")
    assert (victim.read_text(), target.read_text()) == ("precious", "record")


def test_a_file_has_the_permissions_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", ["a", "b"])
    finally:
        os.umask(before)
    assert (tmp_path / "file").read_text() == "ab"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]
