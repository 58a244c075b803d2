import errno
import socket

import click
import pytest

from gateway.commands.address import (
    check_address,
    check_loopback,
    prepare_port_file,
    reason,
    write_port_file,
)


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_free_port_passes_and_stays_free():
    check_address("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    check_address("127.0.0.1", port)
    socket.create_server(("127.0.0.1", port)).close()


def test_every_address_of_the_machine_can_be_asked_for():
    check_address("", 0)
    check_address("0.0.0.0", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.1"])
def test_only_this_machine_reaches_its_loopback(host):
    check_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.0.2.1"])
def test_what_others_reach_needs_a_word_about_keys(host):
    with pytest.raises(click.UsageError, match="--allow-unauthenticated"):
        check_loopback(host)


def test_a_taken_port_is_one_line(taken_port):
    with pytest.raises(click.ClickException) as caught:
        check_address("127.0.0.1", taken_port)
    assert caught.value.message == (
        f"cannot listen on 127.0.0.1:{taken_port}: Address already in use"
    )


def test_a_taken_port_is_found_among_all_addresses(taken_port):
    with pytest.raises(click.ClickException, match="Address already in use"):
        check_address("", taken_port)


def test_an_address_of_another_machine_is_refused():
    # From a block that is reserved for documents (RFC 5737).
    with pytest.raises(
        click.ClickException, match=r"cannot listen on 192\.0\.2\.1:0: Cannot assign"
    ):
        check_address("192.0.2.1", 0)


def test_a_port_file_is_written_whole_and_replaced(tmp_path):
    path = tmp_path / "port"
    write_port_file(path, 8000)
    assert path.read_text() == "8000"
    write_port_file(path, 80)
    assert path.read_text() == "80"
    assert list(tmp_path.iterdir()) == [path]


def test_the_port_of_an_earlier_server_is_forgotten(tmp_path):
    path = tmp_path / "port"
    path.write_text("8000")
    prepare_port_file(path)
    assert list(tmp_path.iterdir()) == []
    prepare_port_file(path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    path = tmp_path / "nothing" / "port"
    with pytest.raises(click.ClickException) as caught:
        prepare_port_file(path)
    assert caught.value.message == f"cannot write --port-file {path}: No such file or directory"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.EADDRINUSE, "bind on ('::1', 80): address in use"),
            "Address already in use",
        ),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service"),
        (OSError("something else"), "something else"),
    ],
)
def test_a_reason_is_short(error, said):
    assert reason(error).startswith(said)
