"""The picture of the floors in the documentation is drawn from their table."""

from tools.draw_floors import PICTURE, draw


def test_the_picture_is_up_to_date():
    assert PICTURE.read_text() == draw(), "run python -m tools.draw_floors"
