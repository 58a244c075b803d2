import asyncio
import importlib.util

import pytest
import uvloop

from gateway.event_loop import loop_factory


def test_uvloop_serves_where_it_is_installed():
    assert loop_factory() is uvloop.new_event_loop


def test_without_it_asyncio_serves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert loop_factory() is asyncio.new_event_loop
