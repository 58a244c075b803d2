"""Compiled programs outlive the test run: compiling is most of what the device's tests cost."""

import functools

import jax

from jaxengine.weights.source import cache_dir


@functools.cache
def use_compile_cache() -> None:
    """Keep compiled programs in this user's cache from now on."""
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "test-compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
