"""A client that signs its requests with the token, if there is one, and has the server prove that it
knows the token as well.
"""

from __future__ import annotations

from collections.abc import Mapping

from hangwatch.protocol.signatures import PROOF_HEADER

from .client import BoundedClient, NewConnectionError, Reply
from .target import ServerTarget

PROOF_PATH = "/api/v1/proof"


class SignedClient:
    """One connection to the server, for the requests of a node agent."""

    def __init__(self, target: ServerTarget, timeout_s: float) -> None:
        self._client = BoundedClient(target, timeout_s)
        self._credential = target.credential

    @property
    def is_server_known(self) -> bool:
        """Whether orders may be accepted from who answers; see `BoundedClient`."""
        return self._client.is_server_known

    def close(self) -> None:
        self._client.close()

    def enforce_deadline(self) -> None:
        """See `BoundedClient`."""
        self._client.enforce_deadline()

    def abort(self) -> None:
        """See `BoundedClient`."""
        self._client.abort()

    def send_request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        read_timeout_s: float | None = None,
        is_confidential: bool = False,
    ) -> Reply:
        """Before it sends a confidential request on a new connection, it has the server prove itself
        there. Raises TransportError.
        """
        signed = None if self._credential is None else self._credential.sign_request(body)
        sent_headers = dict(headers or {})
        if signed is not None:
            sent_headers["Authorization"] = signed.header
        try:
            reply = self._client.send_request(
                method,
                path,
                content=body,
                headers=sent_headers,
                read_timeout_s=read_timeout_s,
                is_confidential=is_confidential,
            )
        except NewConnectionError:
            self.send_request("GET", PROOF_PATH)
            if not self.is_server_known:
                raise
            return self.send_request(
                method,
                path,
                body,
                headers,
                read_timeout_s=read_timeout_s,
                is_confidential=is_confidential,
            )
        if self._credential is not None and signed is not None:
            proof = reply.get_header(PROOF_HEADER)
            if self._credential.verify_proof(signed, reply.body, proof):
                self._client.is_server_known = True
        return reply
