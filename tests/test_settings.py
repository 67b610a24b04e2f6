"""Settings from variables of the environment."""

import pytest

from mpistrat.settings import Settings


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("timeout_s", "none", None),
        ("timeout_s", "2.5", 2.5),
        ("checks", "off", False),
        ("fast_paths", "off", False),
        ("wait_notice_s", "0", 0.0),
        ("shared_min_bytes", "auto", None),
        ("shared_min_bytes", "0", 0),
        ("flight_length", "3", 3),
        ("data_threads", "2", 2),
        ("data_threads", "auto", None),
        ("flight_dir", "", None),
    ],
)
def test_what_can_be_read(name, text, value):
    assert getattr(Settings.parse({f"MPISTRAT_{name.upper()}": text}), name) == value


def test_other_variables_are_no_settings():
    assert Settings.parse({"HOME": "/"}) == Settings()


def test_an_unknown_name_is_an_error():
    with pytest.raises(ValueError, match="Unknown setting MPISTRAT_TIMEOUT='1'.*MPISTRAT_CHECKS"):
        Settings.parse({"MPISTRAT_TIMEOUT": "1"})


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("TIMEOUT_S", "soon", "a number of seconds above 0, or none"),
        ("TIMEOUT_S", "-1", "a number of seconds above 0, or none"),
        ("TIMEOUT_S", "0", "a number of seconds above 0, or none"),
        ("WAIT_NOTICE_S", "-1", "a number of seconds, at least 0"),
        ("EXIT_GRACE_S", "nan", "a number of seconds, at least 0"),
        ("CHECKS", "perhaps", "on or off"),
        ("SHARED_MIN_BYTES", "-1", "a number of bytes, at least 0, or auto"),
        ("SHARED_MIN_BYTES", "1.5", "a number of bytes, at least 0, or auto"),
        ("FLIGHT_LENGTH", "0", "a whole number, at least 1"),
        ("DATA_THREADS", "0", "a whole number, at least 1, or auto"),
    ],
)
def test_what_cannot_be_read_says_what_can(name, text, remedy):
    with pytest.raises(ValueError, match=f"MPISTRAT_{name} cannot be '{text}'. Use {remedy}"):
        Settings.parse({f"MPISTRAT_{name}": text})
