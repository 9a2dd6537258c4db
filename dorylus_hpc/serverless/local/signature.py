"""Who may call: AWS's Signature Version 4, checked with botocore's own code."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from calendar import timegm
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/, ]+)/(\d{8})/([^/, ]+)/([^/, ]+)/aws4_request, ?"
    r"SignedHeaders=([a-z0-9;-]+), ?Signature=([0-9a-f]{64})"
)
_CLOCK_SKEW = 300  # seconds; AWS's


class Refusal(NamedTuple):
    """Why a request is refused, in AWS's words."""

    kind: str
    message: str


class _Signer(SigV4Auth):
    """A signer whose key, which is of one day, is derived once a day."""

    def __init__(self, credentials: Credentials, region: str) -> None:
        super().__init__(credentials, "lambda", region)
        self._keys: dict[str, bytes] = {}

    def signature(self, string_to_sign: str, request: AWSRequest) -> str:
        day = request.context["timestamp"][:8]
        if day not in self._keys:
            key = f"AWS4{self.credentials.secret_key}".encode()
            for part in (day, self._region_name, "lambda", "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._keys = {day: key}
        return hmac.digest(self._keys[day], string_to_sign.encode(), "sha256").hex()


class Verifier:
    """Checks signatures against one access key.

    Parameters
    ----------
    access_key, secret_key
        The only credentials that are taken.
    region
        The only region that is taken.
    """

    def __init__(self, access_key: str, secret_key: str, region: str) -> None:
        self._access_key = access_key
        self._region = region
        self._signer = _Signer(Credentials(access_key, secret_key), region)

    def refusal(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Refusal | None:
        """Say why a request is refused; None if it is signed with our key.

        Parameters
        ----------
        method, target
            As received; the target is path and query, still encoded.
        headers
            As received; looked up in any case.
        body
            As received.
        """
        authorization = headers.get("Authorization")
        if authorization is None:
            return Refusal("MissingAuthenticationTokenException", "Missing Authentication Token")
        match = _AUTHORIZATION.fullmatch(authorization)
        if match is None:
            return Refusal("IncompleteSignatureException", "The Authorization header is not of Signature V4.")
        access_key, day, region, service, names, signature = match.groups()
        if not hmac.compare_digest(access_key.encode(), self._access_key.encode()):
            return Refusal(
                "UnrecognizedClientException", "The security token included in the request is invalid."
            )
        date = headers.get("X-Amz-Date", "")
        if day != date[:8] or (region, service) != (self._region, "lambda"):
            return Refusal(
                "InvalidSignatureException",
                f"Credential should be scoped to {date[:8]}/{self._region}/lambda, "
                f"not {day}/{region}/{service}.",
            )
        if abs(_seconds(date) - time.time()) > _CLOCK_SKEW:
            return Refusal(
                "InvalidSignatureException", f"Signature expired: {date} is not within 5 min of now"
            )
        signed = names.split(";")
        digest = headers.get("X-Amz-Content-SHA256")
        complete = {"host", "x-amz-date"} <= set(signed) and (
            digest is None or digest == hashlib.sha256(body).hexdigest()
        )
        request = AWSRequest(
            method,
            f"http://{headers.get('Host')}{target}",
            {name: headers.get(name, "") for name in signed},
            body,
        )
        request.context["timestamp"] = date
        expected = self._signer.signature(
            self._signer.string_to_sign(request, self._signer.canonical_request(request)), request
        )
        if not (complete and hmac.compare_digest(expected, signature)):
            return Refusal(
                "InvalidSignatureException",
                "The request signature we calculated does not match the signature you provided. Check your "
                "AWS Secret Access Key and signing method.",
            )
        return None


@lru_cache(maxsize=8)  # the same second comes many times
def _seconds(date: str) -> float:
    try:
        return timegm(time.strptime(date, "%Y%m%dT%H%M%SZ"))
    except ValueError:
        return 0.0
