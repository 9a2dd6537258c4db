"""TLS of both ends of a connection: version 1.3, and each shows a certificate of the run's own authority.

Nobody else's certificate counts, and the two kinds do not replace each other: OpenSSL wants the purpose
"server" in what a server shows and "client" in what a client shows, and the client wants `NAME` besides.
"""

from __future__ import annotations

import os
import ssl
import tempfile

NAME = "tensor-server.dorylus"  # of every tensor server, wherever it runs: its address proves nothing


def server_context(authority: str, certificate: str, key: str) -> ssl.SSLContext:
    """Return the settings of a tensor server.

    Parameters
    ----------
    authority, certificate, key
        PEM: the run's authority, the server's certificate and its private key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # connections are kept, sessions never resumed
    return _prepared(context, authority, certificate, key)


def client_context(authority: str, certificate: str, key: str) -> ssl.SSLContext:
    """Return the settings of a worker, which connects to `NAME`; see `server_context`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which checks the server's certificate and its name
    return _prepared(context, authority, certificate, key)


def _prepared(context: ssl.SSLContext, authority: str, certificate: str, key: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority)
    # The ssl module reads keys from files only.
    with tempfile.TemporaryDirectory(prefix="dorylus-") as folder:  # mode 0700
        path = os.path.join(folder, "identity.pem")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key + certificate)
        context.load_cert_chain(path)
    return context
