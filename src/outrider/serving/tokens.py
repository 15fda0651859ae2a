"""Bearer tokens and API keys: their file, and the identity of each."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from outrider.errors import SettingsError
from outrider.files import check_private

MIN_TOKEN_CHARS = 16  # characters


class Tokens:
    """The accepted tokens, kept as SHA-256 digests.

    No message and no repr quotes the file, not even the names: with the two columns swapped, a name is the secret.
    """

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        self._digests = dict(digests)

    def __repr__(self) -> str:
        return f"Tokens({len(self._digests)} identities)"

    @classmethod
    def load(cls, path: Path) -> Tokens:
        """Load a text file with one `NAME TOKEN` a line. Blank lines and lines that begin with # are skipped.

        Raises:
            SettingsError: the file cannot be read, can be read by others, holds no token, or has a line that is
                malformed, repeats a name or a token, or has a token shorter than 16 characters.
        """
        digests: dict[str, bytes] = {}
        for number, line in enumerate(_read_private(path).splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, token = _parse_line(line, f"{path}, line {number}")
            if name in digests:
                raise SettingsError(f"{path}, line {number}: the name was given before; each name has one token")
            if _token_digest(token) in digests.values():
                raise SettingsError(f"{path}, line {number}: the token was given before; each name has its own")
            digests[name] = _token_digest(token)
        if not digests:
            raise SettingsError(f"{path} holds no token: write one `NAME TOKEN` a line")
        return cls(digests)

    def identity(self, token: str) -> str | None:
        """Return the name of a token, or None. Compares in constant time, against timing attacks."""
        given, found = _token_digest(token), None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found


def _read_private(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            check_private(path, file.fileno())
            return file.read()
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:  # not chained: its message quotes the file
        raise SettingsError(f"{path} is not UTF-8 text") from None


def _parse_line(line: str, where: str) -> tuple[str, str]:
    words = line.split()
    if len(words) != 2 or not words[0].isprintable():
        raise SettingsError(f"{where}: expected `NAME TOKEN`, found {len(words)} word(s)")
    name, token = words
    if len(token) < MIN_TOKEN_CHARS:
        raise SettingsError(f"{where}: the token is shorter than {MIN_TOKEN_CHARS} characters")
    if not (token.isascii() and token.isprintable()):  # gRPC metadata could not carry it
        raise SettingsError(f"{where}: a token may contain ASCII letters, digits and signs only")
    return name, token


def _token_digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
