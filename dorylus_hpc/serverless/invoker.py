"""Calls a Lambda function through boto3, and says what became of the call."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from dorylus_hpc.errors import InputError
from dorylus_hpc.serverless.dispatcher import Result
from lambda_pkg import VERSION
from lambda_pkg.protocol import is_loopback

_THROTTLES = frozenset({"TooManyRequestsException", "EC2ThrottledException", "ThrottlingException"})
_PASSING = frozenset(
    {
        "EC2UnexpectedException",
        "EFSMountTimeoutException",
        "ENILimitReachedException",
        "ENINotReadyException",
        "InternalFailure",
        "RequestTimeout",
        "ResourceConflictException",
        "ResourceNotReadyException",
        "ServiceException",
        "ServiceUnavailable",
    }
)
_BILLED = re.compile(rb"Billed Duration: (\d{1,9}) ms")
_LONGEST_ANSWER = 6 * 2**20 + 100  # bytes, as at AWS
_LONGEST_REFUSAL = 64 << 10  # bytes of an answer that is an error; AWS's have a few hundred
_LONGEST_MESSAGE = 500  # characters
_FIRST_REFUSAL = 300  # HTTP statuses from here on are errors to botocore
_CHECK_SECONDS, _CHECK_CALLS = 10.0, 3  # a call without an answer for so long gets another one beside it


@dataclass(frozen=True)
class Account:
    """Where a function is called, beyond what the machine's own AWS configuration says.

    Attributes
    ----------
    function
        Name or ARN.
    region
        Empty: the machine's default.
    endpoint_url
        Of a service that stands for AWS; empty: AWS.
    access_key, secret_key
        Empty: as boto3 finds them.
    """

    function: str
    region: str = ""
    endpoint_url: str = ""
    access_key: str = ""
    secret_key: str = ""


@dataclass(frozen=True)
class Invocation:
    """What became of a call.

    Attributes
    ----------
    result
        How it ended.
    message
        Why, where it did not end well.
    answer
        What the handler returned; empty where it did not.
    billed_ms
        What AWS bills for, 0 where it does not say.
    cold
        The call started a sandbox.
    """

    result: Result
    message: str = ""
    answer: Mapping[str, Any] | None = None
    billed_ms: int = 0
    cold: bool = False


class Invoker:
    """A function, called from many threads.

    Parameters
    ----------
    account
        Which.
    connections
        Calls at once at most.
    seconds
        The function's own timeout; an answer is waited for a little longer.

    Raises
    ------
    InputError
        Not enough is known to call it.
    """

    def __init__(self, account: Account, *, connections: int, seconds: float) -> None:
        self._account = account
        config = Config(
            # The dispatcher repeats; an SDK that does so too runs a task thrice, and one that "adapts" to 429
            # holds calls back.
            retries={"total_max_attempts": 1, "mode": "standard"},
            defaults_mode="legacy",
            proxies=proxies_to(account.endpoint_url),
            connect_timeout=5,
            read_timeout=seconds + 5,
            max_pool_connections=connections,
            tcp_keepalive=True,
            parameter_validation=False,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            self._client = session_of(account).client(
                "lambda",
                region_name=account.region or None,
                endpoint_url=account.endpoint_url or None,
                aws_access_key_id=account.access_key or None,
                aws_secret_access_key=account.secret_key or None,
                config=config,
            )
        except (BotoCoreError, ValueError) as error:  # ValueError: an endpoint that is no URL
            raise InputError(f"Lambda function {account.function}: {_one_line(error)}") from error
        _bound_refusals(self._client)

    def check(self) -> Invocation:
        """Call the function once, without work.

        Returns
        -------
        Invocation
            With the ``protocol``, ``python``, ``numpy``, ``machine`` and ``memory_mb`` of the function.

        Raises
        ------
        InputError
            It can't be called, fails, or speaks another protocol.
        """
        pauses = {Result.FAILED: [0.2, 0.5, 1.0, 2.0], Result.THROTTLED: [0.2, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]}
        while (invocation := self._ask()).result in pauses:
            if not pauses[invocation.result]:
                break
            time.sleep(pauses[invocation.result].pop(0))
        name = self._account.function
        if invocation.result is not Result.DONE or invocation.answer is None:
            raise InputError(f"Lambda function {name} cannot be used: {invocation.message}")
        spoken = invocation.answer.get("protocol")
        if spoken != VERSION:
            raise InputError(
                f"Lambda function {name} speaks protocol {spoken!r}, this version {VERSION!r}: deploy it "
                "again (python -m dorylus_hpc.deploy up)"
            )
        return invocation

    def invoke(self, payload: bytes) -> Invocation:
        """Call the function and wait for its answer. Raises nothing."""
        try:
            response = self._client.invoke(
                FunctionName=self._account.function, Payload=payload, LogType="Tail"
            )
            body = _read(response["Payload"])
        except ClientError as error:
            return self._refused(error)
        except Exception as error:  # whatever a broken connection makes of itself
            lost = isinstance(error, BotoCoreError) and "redentials" in type(error).__name__
            return Invocation(Result.FATAL if lost else Result.FAILED, _one_line(error))
        log = _log(response.get("LogResult", ""))
        billed = _BILLED.search(log)
        cost: dict[str, Any] = {
            "billed_ms": int(billed[1]) if billed else 0,
            "cold": b"Init Duration:" in log,
        }
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if "FunctionError" in response:
            told = answer if isinstance(answer, dict) else {}
            kind = str(told.get("errorType", "error"))
            message = _one_line(f"{kind}: {told.get('errorMessage', body[:200])}")
            return Invocation(Result.FATAL if kind in _FATAL_ERRORS else Result.FAILED, message, **cost)
        if not isinstance(answer, dict):
            return Invocation(Result.FAILED, f"an answer that is no object: {body[:100]!r}", **cost)
        return Invocation(Result.DONE, str(answer.get("reason", "")), _understood(answer), **cost)

    def close(self) -> None:
        """Close idle connections."""
        self._client.close()
        gc.collect()  # the frames of a call that broke off are cycles in botocore, and hold its connections

    def _ask(self) -> Invocation:
        """Call without work; again beside a call that is not answered soon, which may be lost.

        A service that hangs, or sends byte by byte, is not waited for as long as a task may take.
        """
        answers: SimpleQueue[Invocation] = SimpleQueue()
        for _ in range(_CHECK_CALLS):
            threading.Thread(
                target=lambda: answers.put(self.invoke(b'{"hello": true}')), name="check", daemon=True
            ).start()
            with contextlib.suppress(Empty):
                return answers.get(timeout=_CHECK_SECONDS)
        return Invocation(Result.FATAL, f"no answer within {_CHECK_CALLS * _CHECK_SECONDS:g} s")

    def _refused(self, error: ClientError) -> Invocation:
        code = error.response.get("Error", {}).get("Code", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        message = _one_line(error)
        if code in _THROTTLES or status == 429:
            return Invocation(Result.THROTTLED, message)
        if code in _PASSING or status >= 500:
            return Invocation(Result.FAILED, message)
        return Invocation(Result.FATAL, message)


# Errors of a handler that another try would only repeat.
_FATAL_ERRORS = frozenset({"VersionError", "Runtime.ImportModuleError", "Runtime.HandlerNotFound"})


def session_of(account: Account) -> boto3.Session:
    """Return a new session: what others did with the default one is theirs.

    With keys in the account, the machine's own AWS configuration means something else and is not read.
    """
    # As botocore has them: name in a file, name in the environment, value, conversion.
    nothing = {
        "profile": (None, None, None, None),
        "config_file": (None, None, os.devnull, None),
        "credentials_file": (None, None, os.devnull, None),
    }
    session = botocore.session.Session(session_vars=nothing if account.access_key else None)
    return boto3.Session(botocore_session=session)


def proxies_to(endpoint_url: str) -> dict[str, str] | None:
    """Return no proxies for this machine itself, which another one cannot reach; None: as the system says."""
    try:
        host = urlsplit(endpoint_url).hostname
    except ValueError:  # no URL, which the client says
        host = None
    return {} if host and is_loopback(host) else None


def default_region() -> str:
    """Return the region of this machine's AWS configuration; empty if there is none.

    Raises
    ------
    InputError
        The configuration cannot be read, or has no such profile.
    """
    try:
        return boto3.session.Session().region_name or ""
    except BotoCoreError as error:
        raise InputError(f"the AWS configuration of this machine: {_one_line(error)}") from error


def _bound_refusals(client: Any) -> None:
    """Cut the bodies of errors: botocore reads these by itself, to their end, which may never come."""
    session = client._endpoint.http_session  # botocore has no door to it
    send = session.send

    def send_and_bound(request: Any) -> Any:
        response = send(request)
        if response.status_code >= _FIRST_REFUSAL:
            response.raw = _Cut(response.raw)
        return response

    session.send = send_and_bound


class _Cut:
    """The beginning of a body."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def stream(self) -> Iterator[bytes]:
        """Return what botocore reads."""
        left = _LONGEST_REFUSAL
        for piece in self._raw.stream(_LONGEST_REFUSAL):
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                self._raw.close()  # or the connection would go back to the pool with the rest
                return


def _read(payload: Any) -> bytes:
    """Read an answer, of bounded length."""
    body = b""
    while piece := payload.read(_LONGEST_ANSWER + 1 - len(body)):
        body += piece
        if len(body) > _LONGEST_ANSWER:
            payload.close()
            raise ValueError(f"an answer of more than {_LONGEST_ANSWER} bytes")
    return body


def _log(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except ValueError:
        return b""


def _understood(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without the numbers that are none: what answers may be anything."""
    answer = dict(answer)
    for name in ("kept", "memory_mb"):
        if not (isinstance(answer.get(name), int) and _is_number(answer[name])):
            answer.pop(name, None)
    seconds = answer.pop("seconds", None)
    if isinstance(seconds, dict):
        answer["seconds"] = {name: value for name, value in seconds.items() if _is_number(value)}
    return answer


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _MOST


_MOST = 1e9  # a count, megabytes, or seconds beyond it are nonsense


def _one_line(error: Exception | str) -> str:
    """What is told of an error; the body of an answer may be in it."""
    text = " ".join(str(error)[: 2 * _LONGEST_MESSAGE].split()) or type(error).__name__
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} ..."
