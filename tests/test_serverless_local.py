"""The local Lambda service, through an unmodified boto3 client and handlers in real sandboxes."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError, HTTPClientError, ReadTimeoutError
from multidict import CIMultiDict

from dorylus_hpc.errors import InputError
from dorylus_hpc.serverless import archive
from dorylus_hpc.serverless.local import Faults, LocalService, LocalSettings
from dorylus_hpc.serverless.local.faults import Fate
from dorylus_hpc.serverless.local.limits import Limits
from dorylus_hpc.serverless.local.network import Lane
from dorylus_hpc.serverless.local.settings import parse
from dorylus_hpc.serverless.local.signature import Verifier

PROBE = '''
"""A handler that does what its event asks for."""
import json, os, socket, sys, threading, time

COUNT = 0

def handler(event, context):
    global COUNT
    COUNT += 1
    what = event.get("do", "count") if isinstance(event, dict) else "echo"
    return globals()[what](event, context)

def count(event, context):
    return {"count": COUNT, "pid": os.getpid()}

def echo(event, context):
    return {"event": event, "id": context.aws_request_id, "arn": context.invoked_function_arn,
            "memory": context.memory_limit_in_mb, "left": context.get_remaining_time_in_millis()}

def say(event, context):
    print(event["text"])
    os.write(2, b"and to stderr\\n")

def fail(event, context):
    raise KeyError("no such thing")

def leave(event, context):
    os._exit(event["status"])

def wait(event, context):
    threading.Event().wait()

def large(event, context):
    return "x" * event["size"]

def hold_memory(event, context):
    held = bytearray(event["size"])
    held[::4096] = b"x" * len(held[::4096])
    threading.Event().wait()

def burn(event, context):
    began, used = time.perf_counter(), time.process_time()
    while time.process_time() - used < event["seconds"]:
        pass
    return time.perf_counter() - began

def look_around(event, context):
    import numpy
    try:
        import boto3
    except ImportError:
        boto3 = None
    threads = len(os.listdir("/proc/self/task"))
    return {"environment": dict(os.environ), "path": sys.path, "cwd": os.getcwd(), "numpy": numpy.__file__,
            "boto3": boto3 is not None, "session": os.getsid(0), "pid": os.getpid(), "threads": threads}

def meet(event, context):
    """Tell the test that this runs, and wait for its word."""
    with socket.create_connection(("127.0.0.1", event["port"])) as line:
        line.sendall(b"%d\\n" % os.getpid())
        line.recv(1)
    return os.getpid()

def note(event, context):
    with open(event["file"], "a") as file:
        file.write("%d\\n" % event["number"])
    return event["number"]

def talk(event, context):
    """How long it takes to connect, to and fro, and to send."""
    times = [time.perf_counter()]
    try:
        line = socket.create_connection(("127.0.0.1", event["port"]), timeout=20)
    except OSError as error:
        return type(error).__name__
    with line:
        times.append(time.perf_counter())
        line.sendall(b"a")
        assert line.recv(1) == b"a"
        times.append(time.perf_counter())
        line.sendall(b"b" * event["size"])
        line.shutdown(socket.SHUT_WR)
        received = bytearray()
        while data := line.recv(1 << 16):
            received += data
        times.append(time.perf_counter())
    return {"seconds": [b - a for a, b in zip(times, times[1:])], "back": len(received)}
'''


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.py").write_text(PROBE)
    return folder


@pytest.fixture(scope="module")
def start(probe):
    """Start services that end with the test module."""
    with ExitStack() as stack:

        def start(**settings):
            given = {"archive": probe, "handler": "probe.handler", "timeout": 60.0, **settings}
            return stack.enter_context(LocalService(LocalSettings(**given)))

        yield start


@pytest.fixture(scope="module")
def plain(start):
    return start(concurrency=3)


@contextmanager
def running(probe, **settings):
    given = {"archive": probe, "handler": "probe.handler", "timeout": 60.0, **settings}
    with LocalService(LocalSettings(**given)) as service:
        yield service


def call(service, do="count", *, client=None, **event):
    """What the client gets: the answer, and the error if there is one."""
    client = client or service.client()
    payload = json.dumps({"do": do, **event}).encode()
    response = client.invoke(FunctionName=service.settings.function, Payload=payload, LogType="Tail")
    assert response["StatusCode"] == 200
    return json.loads(response["Payload"].read()), response.get("FunctionError")


def error_of(service, do, **event):
    answer, error = call(service, do, **event)
    assert error == "Unhandled"
    return answer


def until(condition, what):
    """Wait for something that is about to happen; fail if it does not."""
    deadline = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.005)
    return found


def state(pid):
    """Of a process: its letter in /proc, or an empty text if it has ended."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if letter == "Z" else letter


class Meeting:
    """Where handlers say that they run, and wait to be let go."""

    def __init__(self):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(20)
        self.port = self.server.getsockname()[1]
        self.lines = {}

    def arrive(self):
        line, _ = self.server.accept()
        pid = int(line.makefile().readline())
        self.lines[pid] = line
        return pid

    def let_go(self, pid):
        line = self.lines.pop(pid)
        line.sendall(b"g")
        line.close()

    def close(self):
        for line in self.lines.values():
            line.close()
        self.server.close()


@pytest.fixture
def meeting():
    meeting = Meeting()
    yield meeting
    meeting.close()


# Calls that go well.


def test_the_second_call_finds_the_sandbox_warm(probe):
    with running(probe) as service:
        first, second = call(service)[0], call(service)[0]
        assert (first["count"], second["count"]) == (1, 2)
        assert first["pid"] == second["pid"]
        statistics = service.statistics()
        assert (statistics["invocations"], statistics["completed"], statistics["cold_starts"]) == (2, 2, 1)
        assert statistics["gb_seconds"] == pytest.approx(statistics["billed_seconds"] * 1769 / 1024)
        assert statistics["billed_seconds"] > 0


def test_the_handler_sees_event_and_context(plain):
    response = plain.client().invoke(FunctionName="dorylus-hpc", Payload=b'["\xc3\xa4", 1.5, null]')
    answer = json.loads(response["Payload"].read())
    assert answer["event"] == ["ä", 1.5, None]
    assert answer["id"] == response["ResponseMetadata"]["RequestId"]
    assert answer["arn"] == plain.settings.arn
    assert answer["memory"] == "1769"
    assert 0 < answer["left"] <= 60_000
    assert response["ExecutedVersion"] == "$LATEST"


def test_no_payload_is_an_empty_event(plain):
    response = plain.client().invoke(FunctionName="dorylus-hpc")
    assert json.loads(response["Payload"].read())["pid"] > 0


@pytest.mark.parametrize(
    "name",
    ["dorylus-hpc", "dorylus-hpc:$LATEST", "arn:aws:lambda:us-east-1:000000000000:function:dorylus-hpc",
     "000000000000:function:dorylus-hpc"],
)  # fmt: skip
def test_the_function_has_all_its_names(plain, name):
    assert plain.client().invoke(FunctionName=name)["StatusCode"] == 200


def test_log_tail_as_aws_has_it(probe):
    with running(probe, memory_mb=300) as service:
        client = service.client()

        def tail(text):
            payload = json.dumps({"do": "say", "text": text}).encode()
            response = client.invoke(FunctionName="dorylus-hpc", Payload=payload, LogType="Tail")
            return response["ResponseMetadata"]["RequestId"], base64.b64decode(response["LogResult"]).decode()

        request_id, log = tail("hello")
        report = re.search(
            r"REPORT RequestId: (\S+)\tDuration: ([\d.]+) ms\tBilled Duration: (\d+) ms\t"
            r"Memory Size: 300 MB\tMax Memory Used: (\d+) MB\tInit Duration: ([\d.]+) ms\t\n$",
            log,
        )
        assert report is not None, log
        assert report[1] == request_id
        assert int(report[3]) == pytest.approx(float(report[2]) + float(report[5]), abs=1.01)
        assert 5 < int(report[4]) < 300
        said = "hello\nand to stderr\n"
        assert f"START RequestId: {request_id} Version: $LATEST\n{said}END RequestId: {request_id}\n" in log
        request_id, log = tail("again")
        assert log.startswith(f"START RequestId: {request_id}") and "Init Duration" not in log
        assert "hello" not in log
        _, log = tail("x" * 10_000)
        assert len(log) == 4096 and log.startswith("xxx") and "Max Memory Used" in log
        response = client.invoke(FunctionName="dorylus-hpc")
        assert "LogResult" not in response


def test_what_sandboxes_print_goes_to_the_log(probe, tmp_path):
    with running(probe, log=tmp_path / "log") as service:
        call(service, "say", text="for the record")
    assert "for the record\nand to stderr\nEND" in (tmp_path / "log").read_text()


def test_a_dry_run_runs_nothing(plain):
    before = plain.statistics()["invocations"]
    response = plain.client().invoke(FunctionName="dorylus-hpc", InvocationType="DryRun", Payload=b"{}")
    assert response["StatusCode"] == 204
    assert plain.statistics()["invocations"] == before


def test_the_function_describes_itself(plain):
    client = plain.client()
    client.get_waiter("function_active_v2").wait(FunctionName="dorylus-hpc", WaiterConfig={"MaxAttempts": 1})
    client.get_waiter("function_updated_v2").wait(FunctionName="dorylus-hpc", WaiterConfig={"MaxAttempts": 1})
    function = client.get_function(FunctionName="dorylus-hpc")
    configuration = client.get_function_configuration(FunctionName="dorylus-hpc")
    configuration.pop("ResponseMetadata")
    assert function["Configuration"] == configuration
    assert (configuration["MemorySize"], configuration["Timeout"]) == (1769, 60)
    assert configuration["Runtime"] == f"python3.{sys.version_info.minor}"
    assert configuration["State"] == "Active"
    assert len(base64.b64decode(configuration["CodeSha256"])) == 32
    reserved = client.get_function_concurrency(FunctionName="dorylus-hpc")
    assert reserved["ReservedConcurrentExecutions"] == 3


def test_a_zip_is_the_code(probe, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as opened:
        opened.write(probe / "probe.py", "inner/probe.py")
        opened.writestr("inner/__init__.py", "")
    with running(tmp_path / "a.zip", handler="inner.probe.handler") as service:
        assert call(service)[0]["count"] == 1
        digest = service.client().get_function_configuration(FunctionName="dorylus-hpc")["CodeSha256"]
    assert digest == base64.b64encode(hashlib.sha256((tmp_path / "a.zip").read_bytes()).digest()).decode()


# Calls that do not.


def test_an_exception_of_the_handler(plain):
    before = plain.statistics()["function_errors"]
    answer = error_of(plain, "fail")
    assert answer["errorType"] == "KeyError"
    assert answer["errorMessage"] == "'no such thing'"
    assert "no such thing" in "".join(answer["stackTrace"])
    assert re.fullmatch(r"[0-9a-f-]{36}", answer["requestId"])
    assert plain.statistics()["function_errors"] == before + 1


@pytest.mark.parametrize(
    ("status", "why"),
    [(3, "Runtime exited with error: exit status 3"), (0, "Runtime exited without providing a reason")],
)
def test_a_runtime_that_exits(plain, status, why):
    answer = error_of(plain, "leave", status=status)
    assert answer["errorType"] == "Runtime.ExitError"
    assert re.fullmatch(rf"RequestId: \S+ Error: {why}", answer["errorMessage"])
    assert call(plain)[0]["count"] >= 1  # another sandbox goes on


def test_a_call_that_takes_too_long(probe, meeting):
    with running(probe, timeout=0.5) as service:
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(error_of, service, "meet", port=meeting.port)
            pid = meeting.arrive()
            answer = future.result()
        assert answer["errorType"] == "Sandbox.Timedout"
        assert answer["errorMessage"].endswith(" Error: Task timed out after 0.50 seconds")
        until(lambda: not state(pid), "the end of the sandbox")
        statistics = service.statistics()
        assert statistics["timeouts"] == 1
        assert statistics["billed_seconds"] >= 0.5


def test_a_handler_that_cannot_be_imported(probe):
    with running(probe, handler="missing.handler") as service:
        answer = error_of(service, "count")
        assert answer["errorType"] == "Runtime.ImportModuleError"
        assert "No module named 'missing'" in answer["errorMessage"]
        assert error_of(service, "count")["errorType"] == "Runtime.ImportModuleError"


def test_answers_and_requests_that_are_too_large(plain):
    assert len(call(plain, "large", size=6_000_000)[0]) == 6_000_000
    answer = error_of(plain, "large", size=6_291_600)
    assert answer["errorType"] == "Function.ResponseSizeTooLarge"
    assert "(6291556 bytes)" in answer["errorMessage"]
    client = plain.client()
    assert call(plain, "count", client=client, ballast="x" * 6_000_000)[1] is None
    with pytest.raises(client.exceptions.RequestTooLargeException, match="smaller than 6291456 bytes"):
        call(plain, "count", client=client, ballast="x" * 6_291_456)
    assert call(plain, "count", client=client)[1] is None


def test_requests_that_make_no_sense(plain):
    client = plain.client()
    with pytest.raises(client.exceptions.InvalidRequestContentException, match="Could not parse"):
        client.invoke(FunctionName="dorylus-hpc", Payload=b"{no json")
    for name in (
        "another",
        "dorylus-hpc:7",
        "arn:aws:lambda:eu-west-1:000000000000:function:dorylus-hpc",
    ):
        with pytest.raises(client.exceptions.ResourceNotFoundException, match="Function not found: arn:aws"):
            client.invoke(FunctionName=name)
    with pytest.raises(client.exceptions.InvalidParameterValueException, match="Event"):
        client.invoke(FunctionName="dorylus-hpc", InvocationType="Event")
    with pytest.raises(ClientError, match="not in the local service"):
        client.delete_function(FunctionName="dorylus-hpc")


# Who may call.


def test_only_the_runs_own_key_may_call(plain):
    def client(access_key, secret_key, region="us-east-1"):
        config = Config(retries={"total_max_attempts": 1})
        return boto3.client(
            "lambda", endpoint_url=plain.endpoint_url, aws_access_key_id=access_key, region_name=region,
            aws_secret_access_key=secret_key, config=config,
        )  # fmt: skip

    for keys, error in (
        ((plain.access_key, "wrong"), "InvalidSignatureException"),
        (("AKIASOMEBODYELSE", plain.secret_key), "UnrecognizedClientException"),
        ((plain.access_key, plain.secret_key, "eu-west-1"), "InvalidSignatureException"),
    ):
        with pytest.raises(ClientError) as caught:
            client(*keys).invoke(FunctionName="dorylus-hpc")
        assert caught.value.response["Error"]["Code"] == error
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    for path in ("/local/statistics", "/2015-03-31/functions/dorylus-hpc", "/"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(plain.endpoint_url + path)
        with refused.value:
            assert refused.value.code == 403


class Signed:
    """A request as boto3 signs it, to be tampered with."""

    def __init__(self, body=b"{}", *, ago=timedelta(), secret_key="secret"):
        date = (datetime.now(UTC) - ago).strftime("%Y%m%dT%H%M%SZ")
        self.target = "/2015-03-31/functions/f%3A%24LATEST/invocations?b=2&a=%20x"
        request = AWSRequest(
            "POST", "http://127.0.0.1:1" + self.target, {"X-Amz-Date": date, "Host": "127.0.0.1:1"}, body
        )
        request.context["timestamp"] = date
        signer = SigV4Auth(Credentials("access", secret_key), "lambda", "us-east-1")
        signature = signer.signature(
            signer.string_to_sign(request, signer.canonical_request(request)), request
        )
        signer._inject_signature_to_request(request, signature)
        self.headers = CIMultiDict(request.headers.items())
        self.body = body

    def refusal(self, method="POST"):
        refusal = Verifier("access", "secret", "us-east-1").refusal(
            method, self.target, self.headers, self.body
        )
        return None if refusal is None else refusal.kind


def test_a_signature_covers_the_whole_request():
    assert Signed().refusal() is None
    assert Signed(ago=timedelta(minutes=4)).refusal() is None
    assert Signed().refusal("GET") == "InvalidSignatureException"
    for changes in ({"body": b"[]"}, {"target": "/2015-03-31/functions/g/invocations"}):
        request = Signed()
        vars(request).update(changes)
        assert request.refusal() == "InvalidSignatureException"
    request = Signed()
    request.headers["X-Amz-Content-SHA256"] = "0" * 64
    assert request.refusal() == "InvalidSignatureException"
    assert Signed(secret_key="other").refusal() == "InvalidSignatureException"
    assert Signed(ago=timedelta(minutes=6)).refusal() == "InvalidSignatureException"
    assert Signed(ago=timedelta(minutes=-6)).refusal() == "InvalidSignatureException"


def test_headers_that_are_no_signature():
    for header, kind in (("", "IncompleteSignatureException"), ("Bearer x", "IncompleteSignatureException")):
        request = Signed()
        request.headers["Authorization"] = header
        assert request.refusal() == kind
    request = Signed()
    del request.headers["Authorization"]
    assert request.refusal() == "MissingAuthenticationTokenException"
    request = Signed()
    # Without the date among the signed headers anybody could move the request to another day.
    request.headers["Authorization"] = request.headers["Authorization"].replace("host;x-amz-date", "host")
    assert request.refusal() == "InvalidSignatureException"
    request = Signed()
    request.headers["X-Amz-Date"] = "now"
    assert request.refusal() == "InvalidSignatureException"


# Sandboxes.


def test_calls_at_once_have_a_sandbox_each_and_the_last_used_is_taken_first(probe, meeting):
    with running(probe, concurrency=3) as service, ThreadPoolExecutor(3) as threads:
        client = service.client()
        futures = [threads.submit(call, service, "meet", client=client, port=meeting.port) for _ in range(3)]
        pids = [meeting.arrive() for _ in range(3)]
        assert len(set(pids)) == 3
        with pytest.raises(client.exceptions.TooManyRequestsException) as caught:
            call(service, client=client)
        assert caught.value.response["Reason"] == "ReservedFunctionConcurrentInvocationLimitExceeded"
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 429
        for number, pid in enumerate(pids, 1):
            meeting.let_go(pid)
            until(lambda number=number: service.statistics()["completed"] == number, "an answer")
        assert {future.result()[0] for future in futures} == set(pids)
        assert call(service, client=client)[0]["pid"] == pids[-1]
        statistics = service.statistics()
        assert (statistics["cold_starts"], statistics["throttles"]) == (3, 1)
        assert statistics["invocations"] == statistics["completed"] + statistics["throttles"]
        assert sorted(statistics["pids"]["idle"]) == sorted(pids)


def test_a_sandbox_is_frozen_between_calls(plain):
    pid = call(plain)[0]["pid"]
    until(lambda: state(pid) == "T", "the freeze")
    assert call(plain)[0]["pid"] == pid
    until(lambda: state(pid) == "T", "the freeze")


def test_an_idle_sandbox_ends(probe):
    with running(probe, idle_seconds=0.1) as service:
        pid = call(service)[0]["pid"]
        until(lambda: not state(pid), "the end of the sandbox")
        until(lambda: service.statistics()["sandboxes"] == {"busy": 0, "idle": 0}, "forgetting it")
        assert call(service)[0]["pid"] != pid
        assert service.statistics()["cold_starts"] == 2


def test_a_sandbox_is_alone(tmp_path, probe, monkeypatch):
    archive.link_installed(tmp_path / "code")
    (tmp_path / "code" / "probe.py").write_text(PROBE)
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "AWS_SECRET_ACCESS_KEY", "PYTHONSTARTUP", "DORYLUS_X"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    with running(tmp_path / "code", memory_mb=512) as service:
        seen = call(service, "look_around")[0]
    environment = seen["environment"]
    arithmetic = {name for name in os.environ if name.startswith(("OPENBLAS_", "NPY_"))}
    assert set(environment) - arithmetic - {"LD_LIBRARY_PATH", "LC_CTYPE"} | {"OPENBLAS_NUM_THREADS"} == {
        "AWS_DEFAULT_REGION", "AWS_EXECUTION_ENV", "AWS_LAMBDA_FUNCTION_MEMORY_SIZE",
        "AWS_LAMBDA_FUNCTION_NAME", "AWS_LAMBDA_FUNCTION_VERSION", "AWS_LAMBDA_INITIALIZATION_TYPE",
        "AWS_LAMBDA_LOG_GROUP_NAME", "AWS_LAMBDA_LOG_STREAM_NAME", "AWS_LAMBDA_RUNTIME_API", "AWS_REGION",
        "HOME", "LAMBDA_RUNTIME_DIR", "LAMBDA_TASK_ROOT", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
        "PATH", "TMPDIR", "TZ", "_HANDLER",
    }  # fmt: skip
    assert environment["AWS_LAMBDA_FUNCTION_MEMORY_SIZE"] == "512"
    assert environment["OPENBLAS_NUM_THREADS"] == "1"
    task = environment["LAMBDA_TASK_ROOT"]
    assert seen["cwd"] == seen["path"][0] == task
    assert seen["numpy"] == f"{task}/numpy/__init__.py"
    assert not seen["boto3"] and not [path for path in seen["path"] if "site-packages" in path]
    assert seen["session"] == seen["pid"]
    assert environment["TMPDIR"].startswith(environment["HOME"])
    assert not Path(environment["HOME"]).exists()  # it went with the sandbox


KINDS = ["watchdog", *(["cgroup"] if Limits("auto", 442).kind == "cgroup" else [])]


@pytest.mark.parametrize("kind", KINDS)
def test_memory_and_processor_are_bounded(probe, kind):
    with running(probe, limits=kind, memory_mb=442) as service:
        assert service.statistics()["limits"] == kind
        seconds = call(service, "burn", seconds=0.3)[0]
        assert seconds > 0.8  # a quarter of a processor: 1.2, less what each kind lets pass at first
        answer = error_of(service, "hold_memory", size=600 * 2**20)
        assert answer["errorType"] == "Runtime.ExitError"
        assert answer["errorMessage"].endswith(" Error: Runtime exited with error: signal: killed")
        assert service.statistics()["crashes"] == 1


# Processes.


def test_stop_leaves_no_process(probe, meeting):
    with running(probe, concurrency=2) as service, ThreadPoolExecutor(2) as threads:
        pids = [service.pid, call(service)[0]["pid"]]
        busy = [threads.submit(call, service, "meet", port=meeting.port) for _ in range(2)]
        pids += [meeting.arrive() for _ in range(2)]
        assert all(map(state, pids)) and service.alive()
        service.stop()
        assert not any(map(state, pids)) and not service.alive()
        for future in busy:
            with pytest.raises((HTTPClientError, ConnectionError)):
                future.result()
        service.stop()


RUN = """
import sys
from pathlib import Path
from dorylus_hpc.serverless.local import LocalService, LocalSettings
with LocalService(LocalSettings(archive=Path(sys.argv[1]), handler="probe.handler")) as service:
    client = service.client()
    client.invoke(FunctionName="dorylus-hpc")
    print(service.pid, *service.statistics()["pids"]["idle"], service._folder, flush=True)
    client.invoke(FunctionName="dorylus-hpc", Payload=b'{"do": "wait"}')
"""


@pytest.mark.parametrize("victim", ["run", "service"])
def test_a_kill_leaves_no_process(probe, victim):
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(probe)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(archive.Path(archive.__file__).parents[2])},
    ) as run:  # fmt: skip
        service, sandbox, folder = run.stdout.readline().split()
        pids = [run.pid, int(service), int(sandbox)]
        assert all(map(state, pids[1:]))
        os.kill(run.pid if victim == "run" else int(service), signal.SIGKILL)
        run.wait()
    until(lambda: not any(map(state, pids)), "the end of all processes")
    until(lambda: not Path(folder.decode()).exists(), "the end of the folder")


def test_a_service_alone_says_how_to_reach_it_and_ends_by_a_signal(probe, tmp_path):
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "dorylus_hpc.serverless.local", f"--ready-file={ready}"]
    environment = {
        **os.environ, "PYTHONPATH": str(Path(archive.__file__).parents[2]),
        "DORYLUS_LOCAL_ACCESS_KEY": "mine", "DORYLUS_LOCAL_SECRET_KEY": "hidden",
    }  # fmt: skip
    options = [f"--archive={probe}", "--handler=probe.handler"]
    with subprocess.Popen([*command, *options], env=environment, stdin=subprocess.DEVNULL) as process:
        until(ready.exists, "the line")
        said = json.loads(ready.read_text())
        assert ready.stat().st_mode & 0o077 == 0
        assert said["endpoint_url"].startswith("http://127.0.0.1:")
        assert (said["access_key"], said["secret_key"], said["pid"]) == ("mine", "hidden", process.pid)
        client = boto3.client(
            "lambda", endpoint_url=said["endpoint_url"], region_name=said["region"],
            aws_access_key_id="mine", aws_secret_access_key="hidden",
        )  # fmt: skip
        assert json.loads(client.invoke(FunctionName="dorylus-hpc")["Payload"].read())["count"] == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert not Path(said["folder"]).exists()


def test_a_service_that_does_not_start_says_why(tmp_path):
    (tmp_path / "a.zip").write_text("no zip")
    with pytest.raises(InputError, match=r"status 2 at its start; it said: .*a\.zip cannot be unpacked"):
        LocalService(LocalSettings(archive=tmp_path / "a.zip")).start()
    with pytest.raises(InputError, match="was not ready within 0 s"):
        LocalService(ready_seconds=0).start()


# The network.


def test_a_lane_has_one_clock_for_all_its_connections():
    lane = Lane(latency=0.2, bandwidth=1000)
    assert lane.arrival(5.0, 100) == pytest.approx(5.2)  # 0.1 to send, 0.1 on the way
    assert lane.arrival(5.0, 100) == pytest.approx(5.3)  # waits for the first
    assert lane.arrival(9.0, 0) == pytest.approx(9.1)
    assert Lane(latency=0.2, bandwidth=0).arrival(5.0, 10**9) == pytest.approx(5.1)


@pytest.fixture
def echo():
    """A server that sends back all that it gets, once it has the end of it, and ends."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(line):
        with line:
            line.sendall(line.recv(1))
            received = bytearray()
            while data := line.recv(1 << 16):
                received += data
            line.sendall(received)

    def accept():
        while True:
            try:
                line, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(line,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


def test_a_line_takes_the_time_that_it_models(probe, echo):
    with running(probe, latency=0.06, bandwidth=2e6) as service:
        answer = call(service, "talk", port=echo, size=400_000)[0]
        connect, to_and_fro, there_and_back = answer["seconds"]
        assert answer["back"] == 400_000
        assert connect >= 0.06
        assert to_and_fro >= 0.06
        assert (
            there_and_back >= 0.06 + 2 * 0.2
        )  # the end of one direction is passed on while the other goes on
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        assert call(service, "talk", port=port, size=1)[0] == "ConnectionRefusedError"


def test_without_a_model_there_is_no_line(plain, echo):
    assert call(plain, "talk", port=echo, size=3_000_000)[0]["back"] == 3_000_000


def test_a_line_holds_back_a_sender_whose_reader_waits(probe):
    """What is under way is bounded: a sender of very much waits for the reader."""
    size = 40_000_000
    with running(probe, latency=0.002) as service, ThreadPoolExecutor(1) as threads:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(20)
            future = threads.submit(call, service, "talk", port=server.getsockname()[1], size=size)
            line, _ = server.accept()
            with line:
                line.sendall(line.recv(1))
                before = memory(service.pid)
                until(lambda: state(service.pid) == "S" and line.recv(1, socket.MSG_PEEK), "the first of it")
                left = size
                while left:
                    left -= len(line.recv(1 << 16))
                    assert memory(service.pid) - before < 35e6
                line.sendall(b"done")
            assert future.result()[0]["back"] == 4


def memory(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Faults.


def test_faults_are_a_function_of_seed_and_number():
    faults = Faults(
        seed=3, drop=0.1, crash_before=0.05, crash_after=0.2, delay=0.3, delay_seconds=2.0, duplicate=0.15,
        slow_start=0.4, slow_start_seconds=0.5,
    )  # fmt: skip
    fates = [faults.decide(number) for number in range(4000)]
    assert fates[::-1] == [faults.decide(number) for number in reversed(range(4000))]

    def share(condition):
        return sum(map(condition, fates)) / len(fates)

    assert share(lambda fault: fault.fate is Fate.DROP) == pytest.approx(0.1, abs=0.02)
    assert share(lambda fault: fault.fate is Fate.CRASH_BEFORE) == pytest.approx(0.05, abs=0.02)
    assert share(lambda fault: fault.fate is Fate.CRASH_AFTER) == pytest.approx(0.2, abs=0.02)
    assert share(lambda fault: fault.delay == 2.0) == pytest.approx(0.3, abs=0.03)
    assert share(lambda fault: fault.duplicate) == pytest.approx(0.15, abs=0.02)
    assert share(lambda fault: fault.slow_start == 0.5) == pytest.approx(0.4, abs=0.03)
    assert not any(fault.throttle for fault in fates)
    other = Faults(seed=4, drop=0.1)
    assert [other.decide(number).fate for number in range(100)] != [fault.fate for fault in fates[:100]]


def test_throttles_come_in_bursts():
    faults = Faults(throttle=0.02, throttle_calls=4)
    throttled = [faults.decide(number).throttle for number in range(1000)]
    bursts = re.findall("1+", "".join("01"[one] for one in throttled))
    assert len(bursts) > 5
    assert all(len(burst) >= 4 for burst in bursts[:-1])
    assert "1111" in bursts


def test_faults_are_written_and_read():
    faults = Faults(seed=7, drop=0.25, throttle=0.1, throttle_calls=3)
    assert str(faults) == "seed=7,drop=0.25,throttle=0.1,throttle_calls=3"
    assert Faults.parse(str(faults)) == faults
    assert Faults.parse(" drop=1 , seed=2") == Faults(drop=1.0, seed=2)
    assert Faults.parse("") == Faults() and str(Faults()) == ""
    for text, words in (
        ("fall=1", "'fall' is none of seed, drop"),
        ("drop=x", "'x' is no float"),
        ("seed=1.5", "'1.5' is no int"),
        ("drop=1.5", "drop=1.5: a share in"),
        ("drop=0.6,crash_after=0.6", "together are more than 1"),
        ("delay_seconds=-1", "seconds, at least 0"),
        ("throttle_calls=0", "at least 1"),
        ("drop=0.1,drop=0.2", "drop is given twice"),
    ):
        with pytest.raises(InputError, match=words):
            Faults.parse(text)


def test_injected_faults_are_those_of_the_seed(probe, tmp_path):
    faults = Faults(
        seed=11, drop=0.1, crash_before=0.15, crash_after=0.15, delay=0.2, delay_seconds=0.01, duplicate=0.2,
        throttle=0.08, throttle_calls=2, slow_start=0.5, slow_start_seconds=0.01,
    )  # fmt: skip
    calls = 24
    expected = [faults.decide(number) for number in range(calls)]
    ran = tmp_path / "ran"
    seen = []
    with running(probe, faults=faults) as service:
        client = service.client(read_timeout=60)
        impatient = service.client(read_timeout=0.2)
        for number, fault in enumerate(expected):
            dropped = fault.fate is Fate.DROP and not fault.throttle
            try:
                answer, error = call(
                    service, "note", client=impatient if dropped else client, number=number, file=str(ran)
                )
            except ReadTimeoutError:
                seen.append("drop")
            except client.exceptions.TooManyRequestsException:
                seen.append("throttle")
            else:
                seen.append("runs" if error is None else answer["errorType"])
                assert error is not None or answer == number
        wanted = [
            "throttle" if fault.throttle
            else {Fate.CRASH_BEFORE: "Runtime.ExitError", Fate.CRASH_AFTER: "Runtime.ExitError"}.get(
                fault.fate, fault.fate.value
            )
            for fault in expected
        ]  # fmt: skip
        assert seen == wanted
        assert {*seen} == {"drop", "throttle", "runs", "Runtime.ExitError"}  # the seed shows every kind

        def times(fault):
            """How often the handler runs: a crash before it leaves only its duplicate."""
            if fault.throttle or fault.fate is Fate.DROP:
                return 0
            return (fault.fate is not Fate.CRASH_BEFORE) + fault.duplicate

        runs = [number for number, fault in enumerate(expected) for _ in range(times(fault))]
        until(lambda: len(ran.read_text().split()) >= len(runs), "the last duplicate")
        assert sorted(map(int, ran.read_text().split())) == runs
        statistics = service.statistics()
    injected = statistics["injected"]
    passed = [fault for fault in expected if not fault.throttle]
    for fate in (Fate.DROP, Fate.CRASH_BEFORE, Fate.CRASH_AFTER):
        assert injected[fate.value] == sum(fault.fate is fate for fault in passed)
    arrived = [fault for fault in passed if fault.fate is not Fate.DROP]
    assert injected["delay"] == sum(fault.delay > 0 for fault in arrived)
    assert injected["duplicate"] == sum(fault.duplicate for fault in arrived) > 0
    assert injected["throttle"] == statistics["throttles"] == seen.count("throttle")
    assert statistics["crashes"] == seen.count("Runtime.ExitError")
    assert statistics["invocations"] == calls
    assert statistics["completed"] == calls - injected["drop"] - injected["throttle"]


# Settings.


def test_settings_are_written_as_a_command_line_and_read(tmp_path):
    settings = LocalSettings(
        archive=tmp_path, latency=0.05, bandwidth=75e6, faults=Faults(drop=0.2, seed=1), memory_mb=512,
        limits="watchdog", log=tmp_path / "log",
    )  # fmt: skip
    assert parse(settings.arguments()).settings == settings
    assert parse(LocalSettings().arguments()).settings == LocalSettings()
    assert not LocalSettings().has_network
    alone = parse([]).settings
    assert (alone.latency, alone.bandwidth) == (0.001, 75e6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"memory_mb": 64}, "--memory-mb 64: at least 128"),
        ({"concurrency": 0}, "--concurrency 0: at least 1"),
        ({"timeout": 0.0}, "--timeout 0.0: a positive number"),
        ({"timeout": float("nan")}, "--timeout nan: a positive number"),
        ({"timeout": 901.0}, "--timeout 901.0: at most 900"),
        ({"port": 65536}, "--port 65536: at most 65535"),
        ({"latency": -1.0}, "--latency -1.0: a number, at least 0"),
        ({"bandwidth": float("inf")}, "--bandwidth inf"),
        ({"limits": "all"}, "--limits all: choose one of auto, cgroup"),
        ({"handler": "handler"}, "--handler handler: MODULE.FUNCTION"),
        ({"archive": Path("/no/where")}, "--archive /no/where does not exist"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(InputError, match=re.escape(words)):
        LocalSettings(**settings)


def test_paths_that_cannot_be(tmp_path, capsys):
    with pytest.raises(InputError, match="--ready-file .* is a folder"):
        parse(["--ready-file", str(tmp_path)])
    for name in ("--ready-file", "--archive", "--log"):
        with pytest.raises(SystemExit, match="2"):
            parse([name, ""])
        assert capsys.readouterr().err == f"local: error: argument {name}: an empty path (see local --help)\n"
