"""Counts every program compiled after the engine is ready. The number must stay zero."""

import jax.monitoring

__all__ = ["CompileGuard"]

# JAX reports each backend compilation, also one answered by the persistent cache, as this event.
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileGuard:
    """A counter that listens to JAX from `arm` until `disarm`."""

    def __init__(self) -> None:
        self.num_compiles = 0
        self._armed = False

    def arm(self) -> None:
        """Start to count. Call it once all programs are compiled."""
        if not self._armed:
            self._armed = True
            jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def disarm(self) -> None:
        """Stop to count."""
        if self._armed:
            self._armed = False
            jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            self.num_compiles += 1
