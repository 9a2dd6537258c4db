"""The Invoke API on 127.0.0.1: what boto3 talks to in place of AWS."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from dorylus_hpc.serverless.local.folders import Folders
from dorylus_hpc.serverless.local.pool import Dropped, Pool, Throttled
from dorylus_hpc.serverless.local.sandbox import MAX_REQUEST
from dorylus_hpc.serverless.local.settings import LocalSettings
from dorylus_hpc.serverless.local.signature import Verifier

STATISTICS = "/local/statistics"
_FUNCTIONS = ("/2015-03-31/functions/", "/2019-09-30/functions/")
_STATUS = {
    "IncompleteSignatureException": 403,
    "InvalidParameterValueException": 400,
    "InvalidRequestContentException": 400,
    "InvalidSignatureException": 403,
    "MissingAuthenticationTokenException": 403,
    "RequestTooLargeException": 413,
    "ResourceNotFoundException": 404,
    "ServiceException": 500,
    "TooManyRequestsException": 429,
    "UnknownOperationException": 404,
    "UnrecognizedClientException": 403,
}
_HELD = 0.05  # seconds between two looks whether the caller of a dropped call has given up


class ApiError(Exception):
    """An error of the API.

    Parameters
    ----------
    kind
        Its name at AWS.
    message
        For the caller.
    more
        Further members of the answer.
    """

    def __init__(self, kind: str, message: str, **more: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.body = {"Type": "User", "message": message, **more}


class Service:
    """The endpoint.

    Parameters
    ----------
    settings, folders
        Of the service.
    pool
        Runs the calls.
    verifier
        Says who may call.
    """

    def __init__(self, settings: LocalSettings, folders: Folders, pool: Pool, verifier: Verifier) -> None:
        self._settings = settings
        self._folders = folders
        self._pool = pool
        self._verifier = verifier
        self._server: asyncio.Server | None = None
        self._http: web.Server | None = None

    async def open(self) -> int:
        """Listen on 127.0.0.1, and return the port."""
        self._http = web.Server(
            self._answer, access_log=None, keepalive_timeout=3600.0, request_factory=_request
        )
        self._server = await asyncio.get_running_loop().create_server(
            self._http, "127.0.0.1", self._settings.port, backlog=1024
        )
        return self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop listening and cut the connections."""
        if self._server is not None:
            self._server.close()
        if self._http is not None:
            for connection in self._http.connections:
                connection.force_close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = str(uuid.uuid4())
        try:
            response = await self._route(request, request_id)
        except ApiError as error:
            response = _error_response(error)
        except OSError as error:  # no process or no descriptor left for a sandbox
            print(f"local: a sandbox could not be started: {error}", file=sys.stderr, flush=True)
            response = _error_response(ApiError("ServiceException", str(error)))
        response.headers["x-amzn-RequestId"] = request_id
        return response

    async def _route(self, request: web.BaseRequest, request_id: str) -> web.Response:
        body = await _read(request)
        refusal = self._verifier.refusal(request.method, request.raw_path, request.headers, body)
        if refusal is not None:
            raise ApiError(refusal.kind, refusal.message)
        path = request.raw_path.partition("?")[0]
        if request.method == "GET" and path == STATISTICS:
            return web.json_response(self._pool.statistics())
        prefix = next((one for one in _FUNCTIONS if path.startswith(one)), None)
        name, _, what = path.removeprefix(prefix or "").partition("/")
        known = {
            ("POST", "invocations"), ("GET", ""), ("GET", "configuration"), ("GET", "concurrency"),
        }  # fmt: skip
        if prefix is None or (request.method, what) not in known:
            raise ApiError("UnknownOperationException", f"{request.method} {path}: not in the local service")
        self._check_function(unquote(name), request.query.get("Qualifier"))
        if what == "invocations":
            return await self._invoke(request, request_id, body)
        concurrency = {"ReservedConcurrentExecutions": self._settings.concurrency}
        if what == "concurrency":
            return web.json_response(concurrency)
        configuration = self._configuration()
        if what == "configuration":
            return web.json_response(configuration)
        code = {"RepositoryType": "S3", "Location": self._folders.task.as_uri()}
        return web.json_response({"Configuration": configuration, "Code": code, "Concurrency": concurrency})

    def _check_function(self, name: str, qualifier: str | None) -> None:
        """Raise unless this is our function: its name, with a qualifier, or (part of) its ARN."""
        settings = self._settings
        short, _, version = name.rpartition("function:")[2].partition(":")
        prefixes = ("", "function:", "000000000000:function:", settings.arn.removesuffix(settings.function))
        prefix = name.removesuffix(f":{version}" if version else "").removesuffix(short)
        version = version or qualifier or "$LATEST"
        if short != settings.function or prefix not in prefixes or version != "$LATEST":
            asked = f"arn:aws:lambda:{settings.region}:000000000000:function:{short}"
            asked += f":{version}" if version != "$LATEST" else ""
            raise ApiError("ResourceNotFoundException", f"Function not found: {asked}")

    async def _invoke(self, request: web.BaseRequest, request_id: str, body: bytes) -> web.Response:
        kind = request.headers.get("X-Amz-Invocation-Type", "RequestResponse")
        if kind == "DryRun":
            return web.Response(status=204)
        if kind != "RequestResponse":
            raise ApiError(
                "InvalidParameterValueException", f"invocation type {kind} is not in the local service"
            )
        payload = body or b"{}"
        try:
            json.loads(payload)
        except ValueError as error:
            raise ApiError(
                "InvalidRequestContentException", f"Could not parse request body into json: {error}"
            ) from None
        try:
            outcome = await self._pool.invoke(request_id, payload)
        except Throttled:
            reason = "ReservedFunctionConcurrentInvocationLimitExceeded"
            raise ApiError("TooManyRequestsException", "Rate Exceeded.", Reason=reason) from None
        except Dropped:
            await _caller_gone(request)
            return web.Response(status=500)  # nobody reads it
        headers = {"X-Amz-Executed-Version": "$LATEST"}
        if outcome.error is not None:
            headers["X-Amz-Function-Error"] = "Unhandled"
        if request.headers.get("X-Amz-Log-Type") == "Tail":
            headers["X-Amz-Log-Result"] = base64.b64encode(outcome.tail).decode()
        return web.Response(body=outcome.body, content_type="application/json", headers=headers)

    def _configuration(self) -> Mapping[str, Any]:
        settings = self._settings
        return {
            "FunctionName": settings.function,
            "FunctionArn": settings.arn,
            "Runtime": f"python{sys.version_info.major}.{sys.version_info.minor}",
            "Role": "arn:aws:iam::000000000000:role/local",
            "Handler": settings.handler,
            "CodeSize": self._folders.code_bytes,
            "Timeout": int(settings.timeout) or 1,
            "MemorySize": settings.memory_mb,
            "CodeSha256": self._folders.code_sha256,
            "Version": "$LATEST",
            "PackageType": "Zip",
            "State": "Active",
            "LastUpdateStatus": "Successful",
        }


def _error_response(error: ApiError) -> web.Response:
    headers = {"x-amzn-ErrorType": error.kind}
    return web.json_response(error.body, status=_STATUS[error.kind], headers=headers)


async def _read(request: web.BaseRequest) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        async for _ in request.content.iter_any():  # to its end, so that the client reads our answer
            pass
        raise ApiError(
            "RequestTooLargeException",
            f"Request must be smaller than {MAX_REQUEST} bytes for the InvokeFunction operation",
        ) from None


async def _caller_gone(request: web.BaseRequest) -> None:
    while request.transport is not None and not request.transport.is_closing():
        await asyncio.sleep(_HELD)


def _request(message, payload, protocol, writer, task):  # type: ignore[no-untyped-def]
    return web.BaseRequest(
        message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=MAX_REQUEST
    )
