"""A client of an engine's HTTP server: JSON in, JSON out, with patience and errors of one line.

Knows nothing of routing. One connection a request, no proxies; a request that fails in a way that may
pass (no connection, time out, HTTP 429 or 5xx, an answer cut short) is sent again after a pause.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from traces.trace import TraceError

PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
LONGEST_PAUSE_S = 30.0
LONGEST_TIMEOUT_S = 1e6
LONGEST_REASON = 200


class _PassingError(Exception):
    """A failure that may be over the next time; ``after_s`` is when the server wants to be asked again."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


class RefusedError(TraceError):
    """The server refuses a request; ``status`` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class StoppedError(TraceError):
    """The client was stopped, for a reason that somebody else tells."""


@dataclass
class HttpClient:
    """Sends JSON to one server; may be shared by threads.

    Parameters
    ----------
    url
        ``http://host:port``, with a path before the server's own where there is one.
    timeout_s
        How long to wait for a connection, and then for each piece of the answer; engines send
        nothing before the last token.
    retries
        How often a request is sent again at most.
    pause_s
        Before the first repetition; it doubles each time, up to half a minute.
    key
        Sent as bearer token, where the server wants one.

    Raises
    ------
    TraceError
        For a URL that is none, negative numbers; from every method where the server refuses
        (``RefusedError``), cannot be reached after all retries, or does not answer in JSON.
    """

    url: str
    timeout_s: float = 600.0
    retries: int = 4
    pause_s: float = 1.0
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), 0
        plain = not (parts.username or parts.query or parts.fragment)
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not plain:
            raise TraceError(f"url is {self.url!r}: must be http://host:port, or https")
        if not 0 < self.timeout_s <= LONGEST_TIMEOUT_S:
            rule = f"must be > 0 and <= {LONGEST_TIMEOUT_S:g}"
            raise TraceError(f"timeout_s is {self.timeout_s}: {rule}")
        if self.retries < 0 or self.pause_s < 0:
            raise TraceError(f"retries are {self.retries}, pause_s {self.pause_s}: must be >= 0")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._base = parts.path.rstrip("/")
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()

    def get(self, path: str, *, retries: int | None = None) -> Any:
        """Return what the server says to GET ``path``."""
        return self._patiently("GET", path, None, retries)

    def post(self, path: str, body: Mapping[str, Any], *, retries: int | None = None) -> Any:
        """Return what the server answers to ``body``; ``retries`` instead of the client's own."""
        return self._patiently("POST", path, body, retries)

    def stop(self) -> None:
        """End all requests under way, in whatever thread, with an error, and refuse others."""
        self._stopped.set()
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def _patiently(
        self, method: str, path: str, body: Mapping[str, Any] | None, retries: int | None
    ) -> Any:
        attempts = 1 + (self.retries if retries is None else retries)
        pause_s = self.pause_s
        for attempt in range(1, attempts + 1):
            if self._stopped.is_set():
                break
            try:
                return self._once(method, path, body)
            except _PassingError as error:
                if attempt == attempts and not self._stopped.is_set():
                    tried = f" ({attempts} attempts)" if attempts > 1 else ""
                    raise TraceError(f"{self.url}{path}: {error}{tried}") from None
                wished_s = pause_s if error.after_s is None else error.after_s
                self._stopped.wait(min(wished_s, LONGEST_PAUSE_S))
                pause_s *= 2
        raise StoppedError(f"{self.url}{path}: was stopped")

    def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"Accept": "application/json", "Connection": "close"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        connection = self._connection()
        try:
            connection.request(method, self._base + path, data, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(error) from None
        except (MemoryError, OverflowError):  # of a length that no memory has
            raise TraceError(f"{self.url}{path}: the answer does not fit into memory") from None
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        return self._answer(path, response, content)

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout_s)
        with self._lock:
            self._open.add(connection)
        return connection

    def _failure(self, error: Exception) -> Exception:
        """Return what to raise for a connection that failed."""
        if isinstance(error, (socket.gaierror, ssl.SSLError)):
            return TraceError(f"{self.url}: {_in_one_line(error.strerror or str(error))}")
        if isinstance(error, TimeoutError):
            return _PassingError(f"no answer for {self.timeout_s:g} s")
        if isinstance(error, http.client.IncompleteRead):
            return _PassingError(f"the answer broke off after {len(error.partial)} bytes")
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return _PassingError(_in_one_line(reason))

    def _answer(self, path: str, response: http.client.HTTPResponse, content: bytes) -> Any:
        if response.status in PASSING_STATUS:
            reason = f"HTTP {response.status}: {_reason(response, content)}"
            raise _PassingError(reason, _seconds(response.getheader("Retry-After")))
        if response.status != 200:
            reason = _reason(response, content)
            if target := response.getheader("Location"):
                reason = f"is to be found at {_in_one_line(target)}"
            message = f"{self.url}{path}: HTTP {response.status}: {reason}"
            raise RefusedError(message, response.status)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            begin = content[:40].decode("utf-8", errors="replace")
            what = f"the answer of {len(content)} bytes is not JSON: {begin!r}"
            raise _PassingError(what) from None


def reason_in(content: bytes) -> str:
    """Return the error message in an answer, in one line; the ways of FastAPI, vLLM and SGLang."""
    text = content.decode("utf-8", errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        found: Any = json.loads(text)
        for key in ("error", "message", "detail"):
            if isinstance(found, dict) and found.get(key) is not None:
                found = found[key]
        text = found if isinstance(found, str) else json.dumps(found)
    return _in_one_line(text)


def _reason(response: http.client.HTTPResponse, content: bytes) -> str:
    return reason_in(content) or _in_one_line(response.reason)


def _in_one_line(text: object) -> str:
    return " ".join(str(text).split())[:LONGEST_REASON]


def _seconds(text: str | None) -> float | None:
    """Return a Retry-After in seconds; None for a date or nothing."""
    return float(text) if text is not None and text.strip().isdecimal() else None
