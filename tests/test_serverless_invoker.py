"""What becomes of a call: which answers of AWS are worth another try, which are not, and what is billed."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
from dataclasses import replace

import pytest
from botocore.response import StreamingBody
from botocore.stub import Stubber

from dorylus_hpc.errors import InputError
from dorylus_hpc.serverless.dispatcher import Result
from dorylus_hpc.serverless.invoker import Account, Invoker, default_region
from lambda_pkg import VERSION

NOWHERE = Account("dense", "us-east-1", "http://127.0.0.1:9", "AKIA", "secret")


@pytest.fixture
def stubbed():
    """An invoker, and what its client is told to answer."""
    invoker = Invoker(NOWHERE, connections=1, seconds=1)
    with Stubber(invoker._client) as stub:
        yield invoker, stub
    invoker.close()


def answer(stub, body, *, error="", log=""):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = {"StatusCode": 200, "Payload": StreamingBody(io.BytesIO(content), len(content))}
    response |= {"FunctionError": error} if error else {}
    response |= {"LogResult": base64.b64encode(log.encode()).decode()} if log else {}
    stub.add_response("invoke", response)


@pytest.mark.parametrize(
    ("code", "status", "result"),
    [
        ("TooManyRequestsException", 429, Result.THROTTLED),
        ("EC2ThrottledException", 502, Result.THROTTLED),
        ("ThrottlingException", 400, Result.THROTTLED),
        ("WhateverItIsCalled", 429, Result.THROTTLED),
        ("ServiceException", 500, Result.FAILED),
        ("EC2UnexpectedException", 502, Result.FAILED),
        ("ResourceConflictException", 409, Result.FAILED),
        ("ResourceNotReadyException", 502, Result.FAILED),
        ("RequestTimeout", 400, Result.FAILED),
        ("WhateverItIsCalled", 503, Result.FAILED),
        ("ResourceNotFoundException", 404, Result.FATAL),
        ("AccessDeniedException", 403, Result.FATAL),
        ("InvalidSignatureException", 403, Result.FATAL),
        ("UnrecognizedClientException", 403, Result.FATAL),
        ("ExpiredTokenException", 403, Result.FATAL),
        ("InvalidRequestContentException", 400, Result.FATAL),
        ("RequestTooLargeException", 413, Result.FATAL),
    ],
)
def test_refusals(stubbed, code, status, result):
    invoker, stub = stubbed
    stub.add_client_error("invoke", code, "said\n so", status)
    invocation = invoker.invoke(b"{}")
    assert invocation.result is result and invocation.answer is None
    assert code in invocation.message and invocation.message.endswith("said so")
    assert (invocation.billed_ms, invocation.cold) == (0, False)


REPORT = "REPORT RequestId: 1\tDuration: 1.50 ms\tBilled Duration: {} ms\tMemory Size: 1769 MB\t"


def test_an_answer(stubbed):
    invoker, stub = stubbed
    answer(stub, {"accepted": True, "reason": ""}, log="START\n" + REPORT.format(12))
    answer(stub, {"accepted": False, "reason": "over"}, log=REPORT.format(1250) + "Init Duration: 80 ms\t")
    answer(stub, {"accepted": True})
    warm, cold, untold = (invoker.invoke(b"{}") for _ in range(3))
    assert (warm.result, warm.message, warm.billed_ms, warm.cold) == (Result.DONE, "", 12, False)
    assert warm.answer == {"accepted": True, "reason": ""}
    assert (cold.result, cold.message, cold.billed_ms, cold.cold) == (Result.DONE, "over", 1250, True)
    assert (untold.result, untold.billed_ms, untold.cold) == (Result.DONE, 0, False)


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("VersionError", Result.FATAL),
        ("Runtime.ImportModuleError", Result.FATAL),
        ("Runtime.HandlerNotFound", Result.FATAL),
        ("TensorServerError", Result.FAILED),
        ("Sandbox.Timedout", Result.FAILED),
        ("Runtime.ExitError", Result.FAILED),
        ("KeyError", Result.FAILED),
    ],
)
def test_errors_of_the_function(stubbed, kind, result):
    invoker, stub = stubbed
    body = {"errorType": kind, "errorMessage": "why"}
    answer(stub, body, error="Unhandled", log=REPORT.format(7))
    invocation = invoker.invoke(b"{}")
    assert (invocation.result, invocation.message) == (result, f"{kind}: why")
    assert invocation.answer is None and invocation.billed_ms == 7


@pytest.mark.parametrize("body", [b"", b"[1]", b"null", b"{", b"\xff"])
@pytest.mark.parametrize("error", ["", "Unhandled"])
def test_an_answer_that_is_none(stubbed, body, error):
    invoker, stub = stubbed
    answer(stub, body, error=error)
    invocation = invoker.invoke(b"{}")
    assert invocation.result is Result.FAILED and invocation.message and invocation.answer is None


def test_what_passes_is_tried_again_before_a_run(stubbed, monkeypatch):
    slept = []
    monkeypatch.setattr("dorylus_hpc.serverless.invoker.time.sleep", slept.append)
    invoker, stub = stubbed
    for _ in range(7):  # an earlier run may still have the function's concurrency
        stub.add_client_error("invoke", "TooManyRequestsException", http_status_code=429)
    for _ in range(4):
        stub.add_client_error("invoke", "ServiceException", http_status_code=500)
    answer(stub, {"protocol": VERSION, "numpy": "2.0"})
    assert invoker.check().answer == {"protocol": VERSION, "numpy": "2.0"}
    stub.assert_no_pending_responses()
    assert len(slept) == 11 and sum(slept) < 20


@pytest.mark.parametrize(
    ("code", "status", "calls"), [("TooManyRequestsException", 429, 8), ("Other", 500, 5)]
)
def test_what_does_not_pass_is_told_before_a_run(stubbed, monkeypatch, code, status, calls):
    monkeypatch.setattr("dorylus_hpc.serverless.invoker.time.sleep", lambda seconds: None)
    invoker, stub = stubbed
    for _ in range(calls):
        stub.add_client_error("invoke", code, http_status_code=status)
    with pytest.raises(InputError, match=f"^Lambda function dense cannot be used: .*{code}"):
        invoker.check()
    stub.assert_no_pending_responses()


@pytest.mark.parametrize("other", ["0", None, int(VERSION)])
def test_a_function_of_another_version_is_refused_before_a_run(stubbed, other):
    invoker, stub = stubbed
    answer(stub, {} if other is None else {"protocol": other})
    with pytest.raises(InputError, match=f"^Lambda function dense speaks protocol {other!r}, .*deploy up"):
        invoker.check()


# ---- without an answer


def test_a_connection_that_breaks_off_is_not_tried_again():
    """The dispatcher repeats, and nobody else: AWS's client would run a task several times."""
    requests = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                connection, _ = server.accept()
                with connection:
                    requests.append(connection.recv(1 << 16))
                if not requests[-1]:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        invoker = Invoker(
            Account("dense", "us-east-1", f"http://127.0.0.1:{port}", "AKIA", "secret"),
            connections=1,
            seconds=1,
        )
        invocation = invoker.invoke(b"{}")
        invoker.close()
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()
    assert invocation.result is Result.FAILED and "Connection" in invocation.message
    assert len(requests) == 2 and requests[0].startswith(b"POST ") and requests[1] == b""


def test_nobody_listens():
    invoker = Invoker(NOWHERE, connections=1, seconds=1)
    invocation = invoker.invoke(b"{}")
    invoker.close()
    assert invocation.result is Result.FAILED and "http://127.0.0.1:9/" in invocation.message


@pytest.fixture
def unconfigured(monkeypatch, tmp_path):
    """A machine of which AWS knows nothing."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)  # which knows what was known when it was made


def test_no_credentials(unconfigured):
    invoker = Invoker(Account("dense", "us-east-1"), connections=1, seconds=1)
    invocation = invoker.invoke(b"{}")
    assert (invocation.result, invocation.message) == (Result.FATAL, "Unable to locate credentials")
    with pytest.raises(
        InputError, match="^Lambda function dense cannot be used: Unable to locate credentials"
    ):
        invoker.check()
    invoker.close()


@pytest.mark.parametrize(
    ("account", "told"), [(Account("dense"), "region"), (Account("dense", "us-east-1", "nowhere"), "nowhere")]
)
def test_what_boto3_does_not_take_is_wrong_input(unconfigured, account, told):
    with pytest.raises(InputError, match=f"^Lambda function dense: .*{told}"):
        Invoker(account, connections=1, seconds=1)


def listening(said):
    """An endpoint that answers one call with 200 and ``{}``, and notes what it was sent."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        with server.accept()[0] as peer:
            said.append(peer.recv(65536).decode())
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        server.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{server.getsockname()[1]}", thread


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("http_proxy", "http://127.0.0.1:9"),
        ("HTTP_PROXY", "http://127.0.0.1:9"),
        ("AWS_PROFILE", "nobody"),
        ("AWS_DEFAULTS_MODE", "nonsense"),
        ("AWS_RETRY_MODE", "nonsense"),
        ("AWS_SESSION_TOKEN", "of somebody else"),
        ("AWS_CONFIG_FILE", "[default]\nregion = mars-north-1\n[x"),
        ("AWS_SHARED_CREDENTIALS_FILE", "[default\n"),
    ],
)
def test_a_service_of_this_machine_does_not_depend_on_how_aws_or_the_net_is_set_up(
    unconfigured, monkeypatch, tmp_path, name, value
):
    if name.endswith("_FILE"):
        (tmp_path / "broken").write_text(value)
        value = str(tmp_path / "broken")
    monkeypatch.setenv(name, value)
    said = []
    url, thread = listening(said)
    invoker = Invoker(Account("dense", "us-east-1", url, "AKIA", "secret"), connections=1, seconds=1)
    assert invoker.invoke(b"{}").result is Result.DONE
    invoker.close()
    thread.join(5)
    assert "/us-east-1/lambda/" in said[0] and "x-amz-security-token" not in said[0].lower()


def test_a_proxy_is_for_other_machines(unconfigured, monkeypatch):
    said = []
    proxy, thread = listening(said)
    monkeypatch.setenv("http_proxy", proxy)
    invoker = Invoker(
        Account("dense", "us-east-1", "http://far.invalid", "AKIA", "secret"), connections=1, seconds=1
    )
    assert invoker.invoke(b"{}").result is Result.DONE
    invoker.close()
    thread.join(5)
    assert said[0].startswith("POST http://far.invalid/")


def test_a_profile_that_does_not_exist_is_told_in_a_line(unconfigured, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InputError, match=r"^the AWS configuration of this machine: .*nobody"):
        default_region()


# ---- answers that no Lambda gives


@pytest.mark.parametrize("log", ["a", "QmlsbGVkIER1cmF0aW9uOiA=" * 2])
def test_a_log_that_is_none(stubbed, log):
    invoker, stub = stubbed
    payload = StreamingBody(io.BytesIO(b"{}"), 2)
    stub.add_response("invoke", {"StatusCode": 200, "Payload": payload, "LogResult": log})
    invocation = invoker.invoke(b"{}")
    assert (invocation.result, invocation.billed_ms, invocation.cold) == (Result.DONE, 0, False)


def test_billing_that_is_no_time(stubbed):
    invoker, stub = stubbed
    answer(stub, {}, log=REPORT.format("9" * 5000))
    assert invoker.invoke(b"{}").billed_ms == 0


@pytest.mark.parametrize("body", [b"[" * 1_000_000, b" " * (6 * 2**20 + 101)], ids=["deep", "long"])
def test_an_answer_beyond_measure(stubbed, body):
    invoker, stub = stubbed
    answer(stub, body)
    invocation = invoker.invoke(b"{}")
    assert invocation.result is Result.FAILED and len(invocation.message) < 200


def test_an_error_whose_type_is_no_text(stubbed):
    invoker, stub = stubbed
    answer(stub, {"errorType": [1], "errorMessage": {}}, error="Unhandled")
    invocation = invoker.invoke(b"{}")
    assert (invocation.result, invocation.message) == (Result.FAILED, "[1]: {}")


def test_numbers_that_are_none_are_left_out(stubbed):
    invoker, stub = stubbed
    answer(stub, b'{"kept": "x", "memory_mb": -5, "seconds": {"a": "b", "c": NaN, "d": 1e999, "e": 2}}')
    answer(stub, b'{"kept": 1e400, "memory_mb": 1769, "seconds": 5}')
    assert invoker.invoke(b"{}").answer == {"seconds": {"e": 2}}
    assert invoker.invoke(b"{}").answer == {"memory_mb": 1769}


def test_a_service_that_does_not_answer_is_told_soon(monkeypatch):
    """However long a task may take."""
    monkeypatch.setattr("dorylus_hpc.serverless.invoker._CHECK_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        invoker = Invoker(Account("dense", "us-east-1", url, "AKIA", "secret"), connections=4, seconds=900)
        with pytest.raises(InputError, match=r"cannot be used: no answer within 0\.6 s$"):
            invoker.check()
        invoker.close()


def test_an_error_whose_body_does_not_end_is_cut():
    sent = []
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        with server.accept()[0] as peer:
            peer.recv(65536)
            peer.sendall(b"HTTP/1.1 500 Oh\r\nTransfer-Encoding: chunked\r\n\r\n")
            try:
                while sum(sent) < 100e6:
                    peer.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
                    sent.append(0x10000)
            except OSError:
                pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    account = replace(NOWHERE, endpoint_url=f"http://127.0.0.1:{server.getsockname()[1]}")
    invoker = Invoker(account, connections=1, seconds=5)
    invocation = invoker.invoke(b"{}")
    thread.join(10)
    server.close()
    invoker.close()
    assert invocation.result is Result.FAILED and "(500)" in invocation.message
    assert len(invocation.message) <= 504 and sum(sent) < 50e6


def test_what_the_function_tells_is_one_line_of_bounded_length(stubbed):
    invoker, stub = stubbed
    answer(stub, {"errorType": "ValueError", "errorMessage": "no\n" * 10**6}, error="Unhandled")
    message = invoker.invoke(b"{}").message
    assert message.startswith("ValueError: no no") and "\n" not in message and len(message) <= 504


def test_an_error_of_aws_is_told_whole():
    url, thread = refusing(b'{"Type": "User", "message": "no such function"}')
    invoker = Invoker(replace(NOWHERE, endpoint_url=url), connections=1, seconds=1)
    invocation = invoker.invoke(b"{}")
    thread.join(5)
    invoker.close()
    assert invocation.result is Result.FATAL and invocation.message.endswith("no such function")


def refusing(body):
    """An endpoint that answers one call with 404 and this body."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        with server.accept()[0] as peer:
            peer.recv(65536)
            kind = "x-amzn-ErrorType: ResourceNotFoundException"
            peer.sendall(f"HTTP/1.1 404 No\r\nContent-Length: {len(body)}\r\n{kind}\r\n\r\n".encode() + body)
        server.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{server.getsockname()[1]}", thread
