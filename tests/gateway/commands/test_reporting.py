import io
import logging
import warnings

import pytest
from rich.console import Console

from gateway.commands.reporting import progress_bar, warnings_in_the_log


def test_a_log_gets_one_line_when_all_is_done():
    log = io.StringIO()
    console = Console(file=log)
    with progress_bar(console, "compiling", "programs") as report:
        report(1, 2)
        assert log.getvalue() == ""
        report(2, 2)
    assert log.getvalue().startswith("compiling: 2 programs in ")
    assert log.getvalue().count("\n") == 1


def test_a_terminal_gets_a_bar():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with progress_bar(console, "compiling", "programs") as report:
        report(1, 2)
        report(2, 2)
    assert "compiling" in screen.getvalue()
    assert "2/2" in screen.getvalue()


def test_bars_follow_each_other_in_one_terminal():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with (
        progress_bar(console, "loading", "tensors") as loading,
        progress_bar(console, "compiling", "programs") as compiling,
    ):
        loading(3, 3)
        compiling(4, 4)
    assert "3/3" in screen.getvalue()
    assert "4/4" in screen.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_is_drawn_for_what_never_began(is_terminal):
    screen = io.StringIO()
    with progress_bar(Console(file=screen, force_terminal=is_terminal), "compiling", "programs"):
        pass
    assert screen.getvalue() == ""


def test_a_warning_is_one_line_of_the_log(caplog):
    with caplog.at_level(logging.WARNING), warnings_in_the_log():
        warnings.simplefilter("default")  # pytest makes them errors
        warnings.warn("an entry\n  is damaged", UserWarning, stacklevel=1)
    assert [record.message for record in caplog.records] == ["an entry is damaged"]


def test_warnings_are_as_before_afterwards():
    with warnings_in_the_log():
        pass
    with pytest.warns(UserWarning, match="loud"):
        warnings.warn("loud", UserWarning, stacklevel=1)
