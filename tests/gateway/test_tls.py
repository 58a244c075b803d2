import asyncio
import shutil
import socket
import ssl
import subprocess

import aiohttp
import pytest

from connections import closed
from gateway.tls import Certificate, CertificateError
from stream_app import until

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificates")


def openssl(arguments: str) -> None:
    subprocess.run([OPENSSL, *arguments.split()], check=True, capture_output=True)


@pytest.fixture(scope="module")
def pems(tmp_path_factory):
    """Two certificates for 127.0.0.1 with their keys, and a key with a passphrase."""
    folder = tmp_path_factory.mktemp("pem")
    for name in ("first", "second"):
        openssl(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
            f"-subj /CN={name} -addext subjectAltName=IP:127.0.0.1 "
            f"-keyout {folder}/{name}.key -out {folder}/{name}.crt"
        )
    openssl(f"ec -aes128 -passout pass:x -in {folder}/first.key -out {folder}/locked.key")
    return folder


def client(pems, *names) -> ssl.SSLContext:
    """A client that trusts these certificates."""
    context = ssl.create_default_context(cadata="")
    for name in names:
        context.load_verify_locations(pems / f"{name}.crt")
    return context


async def asked(url, context) -> int:
    async with aiohttp.ClientSession(url) as session, session.get("/health", ssl=context) as answer:
        return answer.status


@needs_openssl
async def test_a_server_speaks_tls_over_http_and_websocket(start_gateway, pems):
    certificate = Certificate(pems / "first.crt", pems / "first.key")
    gateway = await start_gateway(tls=certificate.context)
    assert gateway.url.startswith("https://127.0.0.1:")
    trusting = client(pems, "first")
    assert await asked(gateway.url, trusting) == 200
    async with (
        aiohttp.ClientSession(gateway.url) as session,
        session.ws_connect("/v1/stream", protocols=["headrace.v1.json"], ssl=trusting) as ws,
    ):
        assert '"hello"' in (await ws.receive()).data
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await asked(gateway.url, client(pems, "second"))
    with pytest.raises(aiohttp.ClientError):
        await asked(gateway.url.replace("https", "http"), None)


@needs_openssl
async def test_slow_clients_are_closed_behind_tls_and_silent_websockets_are_not(
    start_gateway, pems
):
    certificate = Certificate(pems / "first.crt", pems / "first.key")
    gateway = await start_gateway(tls=certificate.context, header_timeout_s=0.5)
    trusting = client(pems, "first")
    async with (
        aiohttp.ClientSession(gateway.url) as session,
        session.ws_connect("/v1/stream", protocols=["headrace.v1.json"], ssl=trusting) as ws,
    ):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", gateway.server.port, ssl=trusting
        )
        writer.write(b"GET / HTTP/1.1\r\nHost: loc")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await ws.receive()
        await ws.send_json({"type": "ping", "t": 1})
        assert '"pong"' in (await ws.receive()).data


@needs_openssl
async def test_a_stop_says_goodbye_behind_tls_too(start_gateway, pems):
    gateway = await start_gateway(tls=Certificate(pems / "first.crt", pems / "first.key").context)
    async with (
        aiohttp.ClientSession(gateway.url) as session,
        session.ws_connect(
            "/v1/stream", protocols=["headrace.v1.json"], ssl=client(pems, "first")
        ) as ws,
    ):
        await ws.receive()
        stopping = asyncio.create_task(gateway.server.stop())
        assert '"goaway"' in (await ws.receive()).data
        assert (await ws.receive()).type is aiohttp.WSMsgType.CLOSE
        assert ws.close_code == 1012
        await stopping


@needs_openssl
async def test_a_renewed_certificate_is_shown_after_a_reload(start_gateway, pems, tmp_path):
    crt, key = tmp_path / "crt", tmp_path / "key"
    shutil.copy(pems / "first.crt", crt)
    shutil.copy(pems / "first.key", key)
    certificate = Certificate(crt, key)
    gateway = await start_gateway(tls=certificate.context)
    shutil.copy(pems / "second.crt", crt)
    with pytest.raises(CertificateError, match="key values mismatch"):
        certificate.reload()
    assert await asked(gateway.url, client(pems, "first")) == 200
    shutil.copy(pems / "second.key", key)
    certificate.reload()
    assert await asked(gateway.url, client(pems, "second")) == 200


@needs_openssl
@pytest.mark.parametrize(
    ("crt", "key", "problem"),
    [
        ("first.crt", "second.key", "mismatch"),
        ("first.crt", None, "cannot be used"),
        ("first.crt", "locked.key", "passphrase"),
        ("first.key", "first.key", "cannot be used"),
        ("none", "first.key", "No such file"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(pems, crt, key, problem):
    with pytest.raises(CertificateError, match=problem) as caught:
        Certificate(pems / crt, None if key is None else pems / key)
    assert "\n" not in str(caught.value)


@needs_openssl
def test_nothing_older_than_tls_1_2_is_spoken(pems):
    certificate = Certificate(pems / "first.crt", pems / "first.key")
    assert certificate.context.minimum_version >= ssl.TLSVersion.TLSv1_2


@needs_openssl
async def test_handshakes_that_go_on_count_as_connections(start_gateway, pems):
    certificate = Certificate(pems / "first.crt", pems / "first.key")
    gateway = await start_gateway(tls=certificate.context, max_connections=2)
    address = ("127.0.0.1", gateway.server.port)
    silent = [socket.create_connection(address) for _ in range(2)]
    reader, writer = await asyncio.open_connection(*address, ssl=client(pems, "first"))
    assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
    await closed(writer)
    for connection in silent:
        connection.close()


@needs_openssl
async def test_handshakes_that_failed_count_no_more(start_gateway, pems):
    certificate = Certificate(pems / "first.crt", pems / "first.key")
    gateway = await start_gateway(tls=certificate.context, max_connections=2, header_timeout_s=0.2)
    silent = [socket.create_connection(("127.0.0.1", gateway.server.port)) for _ in range(2)]
    counted = gateway.server._connections
    await until(lambda: len(counted) == 2)
    await until(lambda: not counted)
    assert await asked(gateway.url, client(pems, "first")) == 200
    for connection in silent:
        connection.close()


@needs_openssl
async def test_a_certificate_with_another_type_of_key_is_shown_after_a_reload(
    start_gateway, pems, tmp_path
):
    openssl(
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=rsa "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {tmp_path}/rsa.key -out {tmp_path}/rsa.crt"
    )
    crt, key = tmp_path / "crt", tmp_path / "key"
    shutil.copy(pems / "first.crt", crt)
    shutil.copy(pems / "first.key", key)
    certificate = Certificate(crt, key)
    gateway = await start_gateway(tls=certificate.context)
    shutil.copy(tmp_path / "rsa.crt", crt)
    shutil.copy(tmp_path / "rsa.key", key)
    certificate.reload()
    assert await asked(gateway.url, client(tmp_path, "rsa")) == 200
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await asked(gateway.url, client(pems, "first"))
