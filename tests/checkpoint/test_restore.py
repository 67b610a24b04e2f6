import contextlib
import gc
import logging

import numpy as np
import pytest

import mpistrat as ms


def variable(shape=()):
    return ms.Variable(np.zeros(shape, np.float32))


@pytest.fixture
def file(tmp_path):
    checkpoint = ms.Checkpoint(a=variable(3), b=variable(), rng=np.random.default_rng(0))
    return checkpoint.write(tmp_path / "run.h5")


def test_both_assertions_pass_where_all_paths_match(file):
    checkpoint = ms.Checkpoint(a=variable(3), b=variable(), rng=np.random.default_rng(0))
    status = checkpoint.restore(file)
    assert status.assert_consumed() is status
    assert status.assert_existing_objects_matched() is status
    assert status.expect_partial() is status


def test_every_path_without_a_match_is_named_at_once(file):
    generator = np.random.default_rng(0)
    status = ms.Checkpoint(a=variable(3), c=[variable((2, 2))], other=generator).restore(file)
    with pytest.raises(ms.errors.CheckpointMismatchError) as caught:
        status.assert_consumed()
    assert isinstance(caught.value, AssertionError)
    missing, unexpected = str(caught.value).split("Unexpected in the file:")
    assert "c/0 (float32 of shape (2, 2))" in missing
    assert "other (state)" in missing
    assert "b (float32 of shape ())" in unexpected
    assert "rng (state)" in unexpected
    assert file in missing


def test_existing_objects_need_a_match_but_the_file_may_hold_more(file):
    checkpoint = ms.Checkpoint(a=variable(3))
    status = checkpoint.restore(file).assert_existing_objects_matched()
    checkpoint.c = variable()
    with pytest.raises(ms.errors.CheckpointMismatchError, match="c") as caught:
        status.assert_existing_objects_matched()
    assert "Unexpected" not in str(caught.value)


def test_an_object_put_in_the_place_of_a_restored_one_is_missing(file):
    checkpoint = ms.Checkpoint(a=variable(3))
    status = checkpoint.restore(file).assert_existing_objects_matched()
    checkpoint.a = variable(3)
    with pytest.raises(ms.errors.CheckpointMismatchError, match="a "):
        status.assert_existing_objects_matched()


@pytest.mark.parametrize("quiet", [False, True])
def test_what_no_object_took_is_warned_of_once(file, caplog, quiet):
    with caplog.at_level(logging.WARNING, "mpistrat"):
        checkpoint = ms.Checkpoint(a=variable(3))
        status = checkpoint.restore(file)
        if quiet:
            status.expect_partial()
        del checkpoint, status
        gc.collect()
    if quiet:
        assert not caplog.messages
    else:
        (message,) = caplog.messages
        assert "No object took b, rng" in message
        assert file in message


def test_a_complete_file_gives_no_warning(file, caplog):
    with caplog.at_level(logging.WARNING, "mpistrat"):
        checkpoint = ms.Checkpoint(a=variable(3), b=variable(), rng=np.random.default_rng(0))
        checkpoint.restore(file)
        del checkpoint
        gc.collect()
    assert not caplog.messages


@pytest.mark.parametrize("method", ["", "expect_partial", "assert_existing_objects_matched"])
def test_what_the_file_lacks_is_warned_of_once(file, caplog, method):
    with caplog.at_level(logging.WARNING, "mpistrat"):
        checkpoint = ms.Checkpoint(a=variable(3), new=variable())
        status = checkpoint.restore(file)
        with contextlib.suppress(ms.errors.CheckpointMismatchError):
            getattr(status, method or "__repr__")()
        assert not caplog.messages
        del status
        gc.collect()
        messages = [each for each in caplog.messages if "lacks" in each]
    assert len(messages) == (not method)
    for message in messages:
        assert f"{file} lacks new (" in message
        assert "expect_partial()" in message
