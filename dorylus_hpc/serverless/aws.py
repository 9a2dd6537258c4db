"""Calls to AWS whose changes are told, counted, and left out of a dry run; this module needs boto3."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import boto3
from botocore import exceptions as aws
from botocore.config import Config

from dorylus_hpc.errors import InputError

# AWS takes some seconds to believe in a new role, or in deleted policies, and refuses changes of a function
# that is changing.
_NOT_YET = (
    "cannot be assumed",
    "does not have permissions to call",
    "KMS key is invalid for CreateGrant",
    "throttled by EC2",
    "cannot be performed at this time",
    "must delete policies first",
)
_PAUSES = (1, 2, 4, 8, 10, 10, 10, 10, 10, 10)  # seconds between attempts

_WRONG_CREDENTIALS = {
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "IncompleteSignature",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "MissingAuthenticationToken",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_GONE = {"ResourceNotFoundException", "NoSuchEntity", "NoSuchEntityException"}


class AwsError(RuntimeError):
    """AWS refused or failed; the message is one line."""


@dataclass(frozen=True)
class Change:
    """A call that changes something."""

    text: str
    service: str
    operation: str
    parameters: Mapping[str, Any]

    def __str__(self) -> str:
        """Return the call, without the code's bytes."""
        return f"{self.service} {self.operation} {json.dumps(self.parameters, default=_without_bytes)}"


def _without_bytes(value: bytes) -> str:
    return f"<{len(value)} bytes, sha256 {hashlib.sha256(value).hexdigest()}>"


class Aws:
    """Calls AWS; knows what it has changed. Use as a context manager.

    Parameters
    ----------
    region
        As AWS names it; None for the one of the user's own configuration.
    endpoint_url
        Of all services, where it is not AWS.
    dry_run
        True only notes what would be changed.
    say
        Gets a line for each change, before it is made.
    pause
        Waits for some seconds.

    Attributes
    ----------
    changes
        That were made, or in a dry run would have been.
    """

    def __init__(
        self,
        region: str | None = None,
        *,
        endpoint_url: str | None = None,
        dry_run: bool = False,
        say: Callable[[str], None] = lambda line: None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        try:
            session = boto3.Session(region_name=region)
        except aws.BotoCoreError as error:
            raise InputError(_one_line(error)) from error
        if not session.region_name:
            raise InputError("--region is missing, and neither AWS_DEFAULT_REGION nor a profile names one")
        self.region: str = session.region_name
        self.dry_run = dry_run
        self.say = say
        self.pause = pause
        self.changes: list[Change] = []
        self._session = session
        self._endpoint_url = endpoint_url
        self._clients: dict[str, Any] = {}

    def __enter__(self) -> Aws:
        """Return itself."""
        return self

    def __exit__(self, *details: object) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()

    def read(self, service: str, operation: str, **parameters: Any) -> Any:
        """Return the answer of a call that changes nothing; None if what it asks for does not exist."""
        try:
            return self._call(service, operation, parameters)
        except aws.ClientError as error:
            if _code(error) in _GONE:
                return None
            raise _explained(error, service, operation) from error

    def change(self, text: str, service: str, operation: str, **parameters: Any) -> None:
        """Make a call that changes something, again and again while AWS is not ready for it.

        What is gone already counts as deleted.
        """
        change = Change(text, service, operation, parameters)
        self.say(f"would call {change}" if self.dry_run else text)
        if not self.dry_run:
            for seconds in (*_PAUSES, None):
                try:
                    self._call(service, operation, parameters)
                    break
                except aws.ClientError as error:
                    if operation.startswith("Delete") and _code(error) in _GONE:
                        return
                    explained = _explained(error, service, operation)
                    new = operation.startswith("Put") and _code(error) in _GONE  # into what was just created
                    if seconds is None or not (new or any(one in str(explained) for one in _NOT_YET)):
                        raise explained from error
                if seconds == _PAUSES[0]:
                    self.say(f"waiting for AWS: {explained}")
                self.pause(seconds)
        self.changes.append(change)

    def _call(self, service: str, operation: str, parameters: Mapping[str, Any]) -> Any:
        try:
            client = self._clients.get(service) or self._clients.setdefault(service, self._client(service))
            return getattr(client, _snake(operation))(**parameters)
        except (aws.NoCredentialsError, aws.PartialCredentialsError, aws.CredentialRetrievalError) as error:
            raise InputError(f"no AWS credentials: {_one_line(error)}") from error
        except aws.BotoCoreError as error:
            raise AwsError(f"{service} {operation}: {_one_line(error)}") from error
        except (aws.ClientError, InputError):
            raise
        except Exception as error:  # botocore's parsers raise anything at an answer that is none of AWS
            raise AwsError(
                f"{service} {operation}: an answer that AWS does not give: {_one_line(error)[:200]}"
            ) from error

    def _client(self, service: str) -> Any:
        config = Config(
            retries={"mode": "standard", "total_max_attempts": 4}, connect_timeout=10, read_timeout=60
        )
        try:
            return self._session.client(service, endpoint_url=self._endpoint_url, config=config)
        except ValueError as error:  # of an endpoint that is no URL
            raise InputError(_one_line(error)) from error


def _snake(operation: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", operation).lower()


def _code(error: aws.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _explained(error: aws.ClientError, service: str, operation: str) -> Exception:
    """Return an error of AWS in one line; an `InputError` where the credentials are wrong."""
    code = _code(error)
    message = _one_line(error.response.get("Error", {}).get("Message", "")) or "no message"
    if code in _WRONG_CREDENTIALS:
        return InputError(f"AWS does not accept these credentials: {code}: {message}")
    return AwsError(f"{service} {operation}: {code}: {message}")
