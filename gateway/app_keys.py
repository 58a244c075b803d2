"""What the application holds for its handlers, by typed keys."""

from aiohttp import web

from gateway.config import GatewayConfig
from gateway.generation import TextGenerator
from gateway.key_ring import KeyRing
from gateway.metrics import Metrics
from jaxengine.token_engine import TokenEngine

__all__ = ["CONFIG", "ENGINE", "GENERATOR", "KEY_RING", "METRICS", "VERSION"]

CONFIG: web.AppKey[GatewayConfig] = web.AppKey("CONFIG", GatewayConfig)
ENGINE: web.AppKey[TokenEngine] = web.AppKey("ENGINE")
GENERATOR: web.AppKey[TextGenerator] = web.AppKey("GENERATOR", TextGenerator)
KEY_RING: web.AppKey[KeyRing] = web.AppKey("KEY_RING", KeyRing)
METRICS: web.AppKey[Metrics] = web.AppKey("METRICS", Metrics)
VERSION: web.AppKey[str] = web.AppKey("VERSION", str)
