from gateway.app import build_app
from gateway.authentication import PUBLIC_ROUTES
from gateway.config import GatewayConfig
from gateway.key_ring import KeyRing
from gateway.openapi_routes import ERRORS, OPERATIONS


def test_the_table_is_exactly_the_routes_of_the_application(make_generator):
    config = GatewayConfig()
    generator = make_generator()
    app = build_app(config, generator, generator.metrics, KeyRing(None))
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.method != "HEAD"
    }
    assert {(o.method, o.path) for o in OPERATIONS} == served


def test_no_operation_comes_twice():
    assert len({(o.method, o.path) for o in OPERATIONS}) == len(OPERATIONS)


def test_each_parameter_of_a_path_is_described():
    for operation in OPERATIONS:
        in_path = {p.name for p in operation.parameters if p.place == "path"}
        assert in_path == {part[1:-1] for part in operation.path.split("/") if part[:1] == "{"}


def test_an_error_is_not_also_an_answer():
    health = next(o for o in OPERATIONS if o.path == "/health")
    assert 503 in health.answers
    assert health.all_errors == (403, 500)


def test_those_that_need_no_key_are_those_that_are_let_in_without():
    assert {o.path for o in OPERATIONS if not o.needs_key} == PUBLIC_ROUTES
    for operation in OPERATIONS:
        assert (401 in operation.all_errors) == operation.needs_key, operation.path


def test_every_error_that_can_come_has_words():
    assert {status for o in OPERATIONS for status in o.all_errors} == set(ERRORS)
