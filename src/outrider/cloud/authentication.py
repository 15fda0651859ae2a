"""Authentication of a gRPC call: the identity of its token, or of its client certificate."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from outrider.errors import CloudError
from outrider.serving.tokens import Tokens

ANONYMOUS = "anonymous"


Metadata = Iterable[tuple[str, str | bytes]]


class Unauthenticated(CloudError):
    """The call carries no token, or an unknown one. The message never quotes it."""


def authenticate(auth: Mapping[str, Iterable[bytes]], metadata: Metadata | None, tokens: Tokens | None) -> str:
    """Return a caller's identity: the token's name, else "cert:…" under mutual TLS, else "anonymous".

    auth, metadata: `auth_context()` and `invocation_metadata()` of grpc.aio's ServicerContext. tokens: if given, a
    token is required even of a caller with a certificate.

    Raises:
        Unauthenticated: tokens are used, and the request carries none, more than one, or an unknown one.
    """
    if tokens is None:
        return _certificate_identity(auth) or ANONYMOUS
    name = tokens.identity(_bearer_token(metadata or ()))
    if name is None:
        raise Unauthenticated("unknown token: this service does not accept it")
    return name


def _bearer_token(metadata: Metadata) -> str:
    values = [value for key, value in metadata if key.lower() == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        raise Unauthenticated("a token is required: send one `authorization: Bearer TOKEN`")
    scheme, _, token = values[0].partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("not a bearer token: send `authorization: Bearer TOKEN`")
    return token.strip()


def _certificate_identity(auth: Mapping[str, Iterable[bytes]]) -> str | None:
    """Return "cert:" and the common name, else the first alternative name, else the certificate's digest.

    The digest keeps certificates without a name apart.
    """
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for name in auth.get(key, ()):
            if name:
                return "cert:" + name.decode("utf-8", "backslashreplace")
    for certificate in auth.get("x509_pem_cert", ()):
        return "cert:sha256:" + hashlib.sha256(certificate).hexdigest()
    return None
