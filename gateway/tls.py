"""Certificates: read at the start, and again when they were renewed."""

import ssl
from pathlib import Path

__all__ = ["Certificate", "CertificateError"]


class CertificateError(ValueError):
    """A certificate and its key cannot be used; the message says so in one line."""


class Certificate:
    """A certificate that a server shows, and its private key.

    Args:
        certfile: the certificate and the chain behind it, in PEM.
        keyfile: its private key without passphrase, in PEM; None if the certfile has it.

    Attributes:
        context: for asyncio; handshakes after `reload` show the new certificate.

    Raises:
        CertificateError: they cannot be used.
    """

    def __init__(self, certfile: Path, keyfile: Path | None) -> None:
        self._certfile = certfile
        self._keyfile = keyfile
        self.context = self._read()
        self._current = self.context
        # A context has one certificate for each type of key: what is read into it later replaces
        # only that of the same type. So handshakes change to another context instead.
        self.context.sni_callback = self._show_current

    def reload(self) -> None:
        """Read the files again.

        Raises:
            CertificateError: they cannot be used; the certificate stays what it was.
        """
        self._current = self._read()

    def _show_current(
        self, connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._current

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self._certfile, self._keyfile, password=_no_passphrase)
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).lower().replace("_", " ")
            raise CertificateError(f"certificate and key cannot be used: {reason}") from error
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else str(error)
            raise CertificateError(f"certificate and key cannot be read: {problem}") from error
        return context


def _no_passphrase() -> str:
    """OpenSSL would ask the terminal, and a server has none."""
    raise ValueError("the private key has a passphrase")
