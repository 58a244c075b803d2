import re
from importlib import resources

import pytest
from aiohttp import web

from gateway import pages
from gateway.middleware import errors_as_json


@pytest.fixture
async def client(aiohttp_client, tmp_path):
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "index.html").write_text("<p>hello")
    (tmp_path / "static" / "dashboard.html").write_text("<p>steps")
    (tmp_path / "static" / "docs.html").write_text("<p>addresses")
    (tmp_path / "static" / "chat.js").write_text("1;")
    (tmp_path / "secret.txt").write_text("secret")
    app = web.Application(middlewares=[errors_as_json])
    pages.add_routes(app, tmp_path / "static")
    return await aiohttp_client(app)


@pytest.mark.parametrize(
    ("path", "text"), [("/", "<p>hello"), ("/dashboard", "<p>steps"), ("/docs", "<p>addresses")]
)
async def test_a_page_comes_with_a_strict_policy(client, path, text):
    response = await client.get(path)
    assert await response.text() == text
    assert response.content_type == "text/html"
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "connect-src 'self' ws: wss:" in policy
    assert "unsafe" not in policy


async def test_what_the_page_loads_has_its_type(client):
    response = await client.get("/static/chat.js")
    assert response.content_type == "text/javascript"


@pytest.mark.parametrize(
    "path",
    ["/static/secret.txt", "/static/..%2fsecret.txt", "/static/%2e%2e/secret.txt", "/static/"],
)
async def test_nothing_outside_the_folder_is_served(client, path):
    response = await client.get(path)
    assert response.status == 404
    assert "secret\n" not in await response.text()


@pytest.mark.parametrize("path", ["/", "/dashboard", "/docs"])
async def test_the_gateway_serves_the_pages_of_the_package(gateway, path):
    async with gateway.session.get(path) as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        html = await response.text()
    # Nothing inline that the policy would block, nothing from another host, nothing missing.
    assert re.findall(r"<style|style=|<script(?![^>]* src=)|\son\w+=|https?://", html) == []
    files = re.findall(r'(?:href|src)="(static/[^"]+)"', html)
    assert len(files) >= 4
    for name in files:
        async with gateway.session.get(f"/{name}") as response:
            assert response.status == 200


def test_every_script_imports_only_files_that_are_there():
    folder = resources.files("gateway") / "static"
    names = {entry.name for entry in folder.iterdir()}
    for name in names:
        if name.endswith(".js"):
            imports = re.findall(r'from "\./([^"]+)"', (folder / name).read_text())
            assert set(imports) <= names, name
