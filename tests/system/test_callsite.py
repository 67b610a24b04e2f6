"""Places in the code of the user, and the frames of threads."""

import gc
import sys
import threading

import pytest

from mpistrat.system.callsite import CodeOwner, _owner_of, frames_of_threads


def collections_in(function):
    """Return during how many collections `function` was the innermost frame of Python."""
    found = []

    def note(phase, _):
        found.append(phase == "start" and sys._getframe(1).f_code is function.__code__)

    threshold = gc.get_threshold()
    gc.callbacks.append(note)
    try:
        gc.set_threshold(1)
        for _ in range(20):
            function()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
    return sum(found)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collects elsewhere")
def test_no_collection_while_the_list_of_threads_is_locked():
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(4)]
    for each in threads:
        each.start()

    def unguarded():
        return sys._current_frames()

    try:
        frames = frames_of_threads()
        assert {each.ident for each in threads} <= frames.keys()
        assert frames[threading.get_ident()] is sys._getframe()
        assert collections_in(unguarded) > 0
        assert collections_in(frames_of_threads) == 0
    finally:
        end.set()
        for each in threads:
            each.join()


@pytest.mark.parametrize("is_on", [True, False])
def test_collections_stay_as_the_program_has_them(is_on):
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        frames_of_threads()
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_sources_of_compiled_packages_are_not_the_users(tmp_path, monkeypatch):
    assert _owner_of("h5py/_objects.pyx") is CodeOwner.INSTALLED
    assert _owner_of("program.py") is CodeOwner.USER
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.pyx").touch()
    assert _owner_of("kernels.pyx") is CodeOwner.USER
