import asyncio
import gc
import importlib.util

import pytest
import uvloop

from gateway.event_loop import loop_factory, settle_garbage_collector


def test_uvloop_serves_where_it_is_installed():
    assert loop_factory() is uvloop.new_event_loop


def test_without_it_asyncio_serves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert loop_factory() is asyncio.new_event_loop


def test_what_is_loaded_is_collected_no_more_and_what_is_new_later():
    threshold = gc.get_threshold()
    try:
        settle_garbage_collector()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > threshold[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
