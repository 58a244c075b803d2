"""Compiled programs outlive the test run: compiling is most of what the device's tests cost."""

import contextlib
import functools
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxengine.weights.source import cache_dir


@functools.cache
def use_compile_cache() -> None:
    """Keep compiled programs in this user's cache from now on."""
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "test-compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def without_compile_cache() -> Iterator[None]:
    """Really compile, whatever lies in the cache."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
