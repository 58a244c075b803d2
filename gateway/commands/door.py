"""Who may come in, from the command line's options: keys and certificate, and both again later."""

import logging
import ssl
from collections.abc import Mapping

import click

from gateway.api_keys import ApiKey, KeyFileError, hash_of_key, read_keys, tenant_weights
from gateway.commands.serve_options import ServeOptions
from gateway.key_ring import KeyRing
from gateway.tenants import tenant_of_key
from gateway.tls import Certificate, CertificateError
from jaxengine.token_engine import TokenEngine

__all__ = ["Door"]

logger = logging.getLogger(__name__)

MIN_KEY_LENGTH = 16  # of a key that somebody made up


class Door:
    """The keys and the certificate of a server.

    Attributes:
        key_ring: who may come in.
        tenant_weights: by `--tenant-weight` and by the keys.

    Raises:
        click.UsageError: a file, or what the options say together, is wrong.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._file = options["api_keys_file"]
        self._given_keys = _given_keys(options["api_key"])
        self._given_weights = dict(options["tenant_weight"])
        self.key_ring = KeyRing(None)
        self.tenant_weights: Mapping[str, float] = self._given_weights
        try:
            self._read_keys()
        except KeyFileError as error:
            raise click.UsageError(f"--api-keys-file {self._file}: {error}") from error
        certfile, keyfile = options["ssl_certfile"], options["ssl_keyfile"]
        self._certificate: Certificate | None = None
        if certfile is not None:
            try:
                self._certificate = Certificate(certfile, keyfile)
            except CertificateError as error:
                raise click.UsageError(f"--ssl-certfile: {error}") from error
        elif keyfile is not None:
            raise click.UsageError("--ssl-keyfile needs --ssl-certfile")

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What to speak TLS with."""
        return None if self._certificate is None else self._certificate.context

    @property
    def description(self) -> str:
        """One line for the operator."""
        if self.key_ring.is_open:
            return "API keys    none: everybody who can connect may ask"
        return f"API keys    {len(self.key_ring.accounts)}"

    def reload(self, engine: TokenEngine) -> None:
        """Read the files again. One that is wrong changes nothing, and the log says so."""
        if self._file is not None:
            try:
                self._read_keys()
            except KeyFileError as error:
                logger.error("the API keys stay as they were: %s: %s", self._file, error)
            else:
                engine.set_tenant_weights(self.tenant_weights)
                logger.info("%d API keys are in force", len(self.key_ring.accounts))
        if self._certificate is not None:
            try:
                self._certificate.reload()
            except CertificateError as error:
                logger.error("the certificate stays as it was: %s", error)
            else:
                logger.info("the certificate was read again")
        if self._file is None and self._certificate is None:
            logger.info("there is neither a key file nor a certificate to read again")

    def _read_keys(self) -> None:
        if self._file is None and not self._given_keys:
            return
        keys = [*self._given_keys, *(read_keys(self._file) if self._file is not None else ())]
        self.tenant_weights = tenant_weights(keys, self._given_weights)
        self.key_ring.replace(keys)


def _given_keys(keys: tuple[str, ...]) -> list[ApiKey]:
    """Return the keys of `--api-key`: an operator's own, whose tenants are told apart by digest."""
    for key in keys:
        if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable():
            raise click.UsageError(
                f"an --api-key must have at least {MIN_KEY_LENGTH} ASCII characters; "
                "`headrace keys new` makes good ones"
            )
    return [
        ApiKey(
            name=f"api-key-{number}",
            sha256=hash_of_key(key),
            tenant=tenant_of_key(f"Bearer {key}"),
            admin=True,
        )
        for number, key in enumerate(keys, start=1)
    ]
