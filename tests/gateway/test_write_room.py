import pytest

from gateway.write_room import has_room


class Transport:
    def __init__(self, num_unsent_bytes):
        self.num_unsent_bytes = num_unsent_bytes

    def get_write_buffer_size(self):
        return self.num_unsent_bytes


@pytest.mark.parametrize(
    ("transport", "expected"),
    [(Transport(0), True), (Transport(16384), True), (Transport(16385), False), (None, False)],
)
def test_there_is_room_while_little_is_unsent(transport, expected):
    assert has_room(transport) is expected
