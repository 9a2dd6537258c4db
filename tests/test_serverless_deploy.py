"""`deploy` against moto's server: real HTTP, a made-up AWS."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import shlex
import sys
import threading
import urllib.request
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

boto3 = pytest.importorskip("boto3")
moto_server = pytest.importorskip("moto.server")

import botocore.loaders  # noqa: E402
import botocore.session  # noqa: E402
from botocore.exceptions import ClientError  # noqa: E402

import lambda_pkg  # noqa: E402
from dorylus_hpc import deploy  # noqa: E402
from dorylus_hpc.errors import InputError  # noqa: E402
from dorylus_hpc.serverless import deployed, functions, upload  # noqa: E402
from dorylus_hpc.serverless.aws import Aws, AwsError  # noqa: E402
from dorylus_hpc.serverless.deployed import Found, describe  # noqa: E402
from dorylus_hpc.serverless.functions import Deployment, Settings  # noqa: E402
from dorylus_hpc.serverless.policies import Names  # noqa: E402

REGION, ACCOUNT, NAME = "eu-west-1", "123456789012", "dense"
FUNCTION_ARN = f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{NAME}"
ROLE = f"{NAME}-{REGION}"
ROLE_ARN = f"arn:aws:iam::{ACCOUNT}:role/{ROLE}"
LOGS = f"/aws/lambda/{NAME}"
VPC = ["--vpc-subnets", "subnet-0a,subnet-0b", "--vpc-security-groups", "sg-0c"]
ENI = f"AWS Lambda VPC ENI-{NAME}-01234567-89ab-cdef-0123-456789abcdef"


@pytest.fixture(scope="module", autouse=True)
def _one_loader():
    """Read each of botocore's large descriptions of services once, not for each session."""
    with pytest.MonkeyPatch.context() as patch:
        loader = botocore.loaders.create_loader()
        patch.setattr(botocore.session, "create_loader", lambda paths=None: loader)
        yield


@pytest.fixture(scope="module")
def server():
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def url(server, monkeypatch, tmp_path):
    """The server, empty, and credentials for it; nothing of the user's own configuration is read."""
    request = urllib.request.Request(f"{server}/moto-api/reset", method="POST")
    urllib.request.urlopen(request).close()
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    return server


@pytest.fixture
def client(url):
    made = []

    def make(service):
        made.append(boto3.client(service, region_name=REGION, endpoint_url=url))
        return made[-1]

    yield make
    for one in made:
        one.close()


def write_archive(path, version=lambda_pkg.VERSION, **more):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("lambda_pkg/__init__.py"), f'VERSION = "{version}"\n')
        for name, content in {"lambda_pkg/handler.py": "", **more}.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return path


@pytest.fixture
def archive(tmp_path):
    return write_archive(tmp_path / "archive.zip")


def sha256(path):
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()


@pytest.fixture
def run(url, capsys):
    def run(command, *options, function=NAME):
        where = ["--function", function, "--region", REGION, "--endpoint-url", url]
        status = deploy.main([command, *where, *map(str, options)])
        printed = capsys.readouterr()
        return SimpleNamespace(
            status=status, out=printed.out, err=printed.err, lines=printed.out.splitlines()
        )

    return run


def everything(client):
    """All that exists in the account."""
    functions_ = client("lambda").list_functions()["Functions"]
    groups = client("logs").describe_log_groups()["logGroups"]
    iam = client("iam")
    roles = [one["RoleName"] for one in iam.list_roles()["Roles"]]
    return (
        {one["FunctionName"]: one["LastModified"] for one in functions_},
        {one["logGroupName"]: one.get("retentionInDays") for one in groups},
        {role: iam.list_role_policies(RoleName=role)["PolicyNames"] for role in roles},
    )


# ---- up ----


def test_up_makes_the_function(run, client, archive):
    result = run("up", "--archive", archive)
    assert (result.status, result.err) == (0, "")
    assert result.lines == [
        f"create log group {LOGS}",
        "keep logs for 14 days",
        f"create role {ROLE}",
        f"put policy 'logs' into role {ROLE}",
        f"create function {NAME}",
        f"function {NAME} is ready: {FUNCTION_ARN}",
    ]
    function = client("lambda").get_function(FunctionName=NAME)
    told = (
        "Runtime",
        "Handler",
        "MemorySize",
        "Timeout",
        "Role",
        "Architectures",
        "CodeSha256",
        "Environment",
    )
    assert {key: function["Configuration"][key] for key in told} == {
        "Runtime": "python3.13",
        "Handler": "lambda_pkg.handler.handler",
        "MemorySize": 1769,
        "Timeout": 60,
        "Role": ROLE_ARN,
        "Architectures": ["x86_64"],
        "CodeSha256": sha256(archive),
        "Environment": {"Variables": {"OPENBLAS_NUM_THREADS": "1"}},
    }
    assert function["Tags"] == {"made-by": "dorylus_hpc", "dorylus-archive": lambda_pkg.VERSION}
    assert "Concurrency" not in function
    group = client("logs").describe_log_groups(logGroupNamePrefix=LOGS)["logGroups"][0]
    assert group["retentionInDays"] == 14
    arn = f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:{LOGS}"
    assert client("logs").list_tags_for_resource(resourceArn=arn)["tags"] == {"made-by": "dorylus_hpc"}


def test_the_role_may_write_logs_and_nothing_else(run, client, archive):
    run("up", "--archive", archive)
    iam = client("iam")
    role = iam.get_role(RoleName=ROLE)["Role"]
    assert role["AssumeRolePolicyDocument"] == {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
        ],
    }
    assert role["Tags"] == [{"Key": "made-by", "Value": "dorylus_hpc"}]
    assert iam.list_role_policies(RoleName=ROLE)["PolicyNames"] == ["logs"]
    assert iam.list_attached_role_policies(RoleName=ROLE)["AttachedPolicies"] == []
    assert iam.get_role_policy(RoleName=ROLE, PolicyName="logs")["PolicyDocument"] == {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": ["logs:CreateLogStream", "logs:PutLogEvents"],
                "Resource": f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:{LOGS}:*",
            }
        ],
    }


def test_in_a_vpc_lambda_may_have_interfaces_and_the_code_may_not(run, client, archive):
    assert run("up", "--archive", archive, *VPC).status == 0
    vpc = client("lambda").get_function(FunctionName=NAME)["Configuration"]["VpcConfig"]
    assert (vpc["SubnetIds"], vpc["SecurityGroupIds"]) == (["subnet-0a", "subnet-0b"], ["sg-0c"])
    policy = client("iam").get_role_policy(RoleName=ROLE, PolicyName="network")["PolicyDocument"]
    allow, deny = policy["Statement"]
    assert allow == {
        "Effect": "Allow",
        "Action": [
            "ec2:CreateNetworkInterface",
            "ec2:DescribeNetworkInterfaces",
            "ec2:DescribeSubnets",
            "ec2:DeleteNetworkInterface",
            "ec2:AssignPrivateIpAddresses",
            "ec2:UnassignPrivateIpAddresses",
        ],
        "Resource": "*",
    }
    assert deny == {
        **allow,
        "Effect": "Deny",
        "Condition": {"ArnEquals": {"lambda:SourceFunctionArn": FUNCTION_ARN}},
    }


def test_options(run, client, archive):
    options = ["--memory-mb", 3538, "--timeout", 30, "--arch", "arm64", "--python", "3.14", "--log-days", 3]
    assert run("up", "--archive", archive, *options, "--concurrency", 40).status == 0
    function = client("lambda").get_function(FunctionName=NAME)
    has = function["Configuration"]
    assert (has["MemorySize"], has["Timeout"], has["Architectures"], has["Runtime"]) == (
        3538,
        30,
        ["arm64"],
        "python3.14",
    )
    assert function["Concurrency"]["ReservedConcurrentExecutions"] == 40
    assert client("logs").describe_log_groups()["logGroups"][0]["retentionInDays"] == 3


def test_up_again_changes_nothing(run, client, archive):
    options = ["--archive", archive, "--concurrency", 7, *VPC]
    assert run("up", *options).status == 0
    before = everything(client)
    for again in (options, ["--archive", archive], [*options, "--vpc-subnets", "subnet-0b,subnet-0a"]):
        result = run("up", *again)
        assert (result.status, result.lines) == (0, [f"nothing to change: function {NAME} is as wanted"])
    assert everything(client) == before


def test_up_changes_what_differs_and_nothing_else(run, client, archive):
    run("up", "--archive", archive, "--timeout", 30, "--concurrency", 5, *VPC)
    write_archive(archive, more="x = 1\n")
    result = run("up", "--archive", archive, "--memory-mb", 512, "--concurrency", 9, "--log-days", 30)
    assert result.lines[:-1] == [
        "keep logs for 30 days",
        f"set MemorySize of function {NAME}",
        f"replace the code of function {NAME}",
        f"reserve a concurrency of 9 for function {NAME}",
    ]
    function = client("lambda").get_function(FunctionName=NAME)
    has = function["Configuration"]
    assert (has["MemorySize"], has["Timeout"], has["CodeSha256"]) == (512, 30, sha256(archive))
    assert has["VpcConfig"]["SubnetIds"] == ["subnet-0a", "subnet-0b"]
    assert function["Concurrency"]["ReservedConcurrentExecutions"] == 9


def test_up_corrects_what_somebody_changed(run, client, archive):
    run("up", "--archive", archive)
    client("lambda").update_function_configuration(
        FunctionName=NAME, Handler="other.handler", Environment={"Variables": {"OWN": "kept"}}
    )
    iam = client("iam")
    wide = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
    iam.put_role_policy(RoleName=ROLE, PolicyName="logs", PolicyDocument=json.dumps(wide))
    trust = iam.get_role(RoleName=ROLE)["Role"]["AssumeRolePolicyDocument"]
    other = {**trust, "Statement": [{**trust["Statement"][0], "Principal": {"Service": "ec2.amazonaws.com"}}]}
    iam.update_assume_role_policy(RoleName=ROLE, PolicyDocument=json.dumps(other))
    assert run("up", "--archive", archive).lines[:-1] == [
        f"correct who may take role {ROLE}",
        f"put policy 'logs' into role {ROLE}",
        f"set Handler, Environment of function {NAME}",
    ]
    assert iam.get_role(RoleName=ROLE)["Role"]["AssumeRolePolicyDocument"] == trust
    has = client("lambda").get_function(FunctionName=NAME)["Configuration"]
    assert has["Environment"]["Variables"] == {"OWN": "kept", "OPENBLAS_NUM_THREADS": "1"}


def test_none_takes_concurrency_and_vpc_away(run, client, archive):
    run("up", "--archive", archive, "--concurrency", 5, *VPC)
    none = ["--concurrency", "none", "--vpc-subnets", "none", "--vpc-security-groups", "none"]
    result = run("up", "--archive", archive, *none)
    assert result.lines[:-1] == [
        f"set VpcConfig of function {NAME}",
        f"reserve no concurrency for function {NAME}",
        f"delete policy 'network' of role {ROLE}",
    ]
    function = client("lambda").get_function(FunctionName=NAME)
    assert "Concurrency" not in function
    assert function["Configuration"]["VpcConfig"]["SubnetIds"] == []
    assert client("iam").list_role_policies(RoleName=ROLE)["PolicyNames"] == ["logs"]


def test_a_function_that_somebody_stopped_stays_so_until_told_otherwise(url):
    stopped = Found(function={"Configuration": {}, "Concurrency": {"ReservedConcurrentExecutions": 0}})
    assert "reserved concurrency 0, which stops it" in "".join(
        describe(stopped, Names(NAME, REGION, ACCOUNT))
    )
    for wanted, calls_made in (
        (None, []),
        (0, ["DeleteFunctionConcurrency"]),
        (5, ["PutFunctionConcurrency"]),
    ):
        with Aws(REGION, endpoint_url=url, dry_run=True) as calls:
            deployment = Deployment(calls, Settings(NAME, concurrency=wanted))
            deployment._concurrency(stopped, deployment.deployed(stopped))
            assert [change.operation for change in calls.changes] == calls_made


def test_the_policy_for_a_vpc_stays_while_lambda_has_interfaces(run, client, archive, interface):
    run("up", "--archive", archive, *VPC)
    result = run("up", "--archive", archive, "--vpc-subnets", "none", "--vpc-security-groups", "none")
    assert f"policy 'network' stays in role {ROLE} until Lambda has given back {interface}" in result.out
    assert client("iam").list_role_policies(RoleName=ROLE)["PolicyNames"] == ["logs", "network"]
    client("ec2").delete_network_interface(NetworkInterfaceId=interface)
    assert run("up", "--archive", archive).lines[0] == f"delete policy 'network' of role {ROLE}"


def test_a_role_of_somebody_else_is_used_and_left_alone(run, client, archive):
    trust = json.dumps({"Version": "2012-10-17", "Statement": []})
    arn = client("iam").create_role(RoleName="theirs", AssumeRolePolicyDocument=trust)["Role"]["Arn"]
    assert run("up", "--archive", archive, "--role", arn).status == 0
    assert client("lambda").get_function(FunctionName=NAME)["Configuration"]["Role"] == arn
    assert run("up", "--archive", archive).lines == [f"nothing to change: function {NAME} is as wanted"]
    assert run("down").status == 0
    assert everything(client) == ({}, {}, {"theirs": []})


def test_a_deleted_role_is_made_again_and_the_function_told(run, client, archive):
    run("up", "--archive", archive)
    client("iam").delete_role_policy(RoleName=ROLE, PolicyName="logs")
    client("iam").delete_role(RoleName=ROLE)
    assert run("up", "--archive", archive).lines[:-1] == [
        f"create role {ROLE}",
        f"put policy 'logs' into role {ROLE}",
        f"set Role of function {NAME}",
    ]


@pytest.mark.parametrize("kind", ["function", "log group", "role"])
def test_what_somebody_else_made_is_not_touched(run, client, archive, kind):
    trust = json.dumps({"Version": "2012-10-17", "Statement": []})
    if kind == "log group":
        client("logs").create_log_group(logGroupName=LOGS)
    else:
        client("iam").create_role(RoleName=ROLE, AssumeRolePolicyDocument=trust)
    if kind == "function":
        client("lambda").create_function(
            FunctionName=NAME, Role=ROLE_ARN, Runtime="python3.13", Handler="h", Code={"ZipFile": b"x"}
        )
        client("iam").tag_role(RoleName=ROLE, Tags=[{"Key": "made-by", "Value": "dorylus_hpc"}])
    before = everything(client)
    result = run("up", "--archive", archive)
    assert result.status == 2
    assert f"made by somebody else (no tag made-by=dorylus_hpc): the {kind} " in result.err
    assert everything(client) == before
    result = run("down")
    assert result.status == 0
    assert f"left alone, since somebody else made it: the {kind} " in result.out
    left = everything(client)
    assert [len(part) for part in left] == [kind == "function", kind == "log group", kind == "role"]


def test_a_large_archive_goes_through_a_bucket_and_does_not_stay_there(run, client, archive, monkeypatch):
    for module in (functions, upload):
        monkeypatch.setattr(module, "MAX_ZIPPED", 100)
    result = run("up", "--archive", archive)
    assert (result.status, everything(client)) == (2, ({}, {}, {}))
    assert f"{archive.stat().st_size} bytes, more than the 100 that go into a call" in result.err
    s3 = client("s3")
    s3.create_bucket(Bucket="uploads", CreateBucketConfiguration={"LocationConstraint": REGION})
    for content in ("", "x = 2\n"):
        write_archive(archive, more=content)
        result = run("up", "--archive", archive, "--s3-bucket", "uploads")
        assert (result.status, result.err) == (0, "")
        assert "remove the upload" in result.lines
        has = client("lambda").get_function(FunctionName=NAME)["Configuration"]
        assert has["CodeSha256"] == sha256(archive)
        assert s3.list_objects_v2(Bucket="uploads")["KeyCount"] == 0


# ---- dry run, status, policy ----


def test_a_dry_run_prints_the_calls_and_makes_none(run, client, archive):
    result = run("up", "--dry-run", "--archive", archive, "--concurrency", 3, *VPC)
    assert result.status == 0
    assert everything(client) == ({}, {}, {})
    called = [line.split(" ", 4)[2:] for line in result.lines]
    assert [(service, operation) for service, operation, _ in called] == [
        ("logs", "CreateLogGroup"),
        ("logs", "PutRetentionPolicy"),
        ("iam", "CreateRole"),
        ("iam", "PutRolePolicy"),
        ("iam", "PutRolePolicy"),
        ("lambda", "CreateFunction"),
        ("lambda", "PutFunctionConcurrency"),
    ]
    create = json.loads(called[5][2])
    assert (create["Role"], create["VpcConfig"]["SecurityGroupIds"]) == (ROLE_ARN, ["sg-0c"])
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert create["Code"]["ZipFile"] == f"<{archive.stat().st_size} bytes, sha256 {digest}>"


def test_a_dry_run_of_down_and_of_a_change(run, client, archive):
    run("up", "--archive", archive)
    before = everything(client)
    assert run("up", "--dry-run", "--archive", archive, "--memory-mb", 512).lines == [
        f'would call lambda UpdateFunctionConfiguration {{"FunctionName": "{NAME}", "MemorySize": 512}}'
    ]
    (line,) = run("up", "--dry-run", "--archive", archive, "--arch", "arm64").lines
    assert line.startswith(
        f'would call lambda UpdateFunctionCode {{"FunctionName": "{NAME}", "Architectures": ["arm64"], '
        f'"ZipFile": "<{archive.stat().st_size} bytes'
    )
    assert [line.split()[3] for line in run("down", "--dry-run").lines] == [
        "DeleteFunction",
        "DeleteLogGroup",
        "DeleteRolePolicy",
        "DeleteRole",
    ]
    assert everything(client) == before


def test_status(run, client, archive):
    assert run("status").lines[:3] == [
        f"function   {NAME}: not there",
        f"log group  {LOGS}: not there",
        f"role       {ROLE}: not there",
    ]
    run("up", "--archive", archive, "--concurrency", 4)
    result = run("status", "--archive", archive)
    assert (
        f"function   {NAME}: Active, python3.13 on x86_64, 1769 MB, 60 s, reserved concurrency 4"
        in result.out
    )
    assert f"archive of version {lambda_pkg.VERSION}, " in result.out
    assert f"sha256 {sha256(archive)}" in result.out
    assert f"log group  {LOGS}: kept for 14 days" in result.out
    assert f"role       {ROLE}: policies logs" in result.out
    assert result.lines[-1] == "up would change nothing"
    before = everything(client)
    write_archive(archive, more="x = 3\n")
    result = run("status", "--archive", archive, "--timeout", 90)
    assert result.lines[-2:] == [
        f"up would set Timeout of function {NAME}",
        f"up would replace the code of function {NAME}",
    ]
    assert everything(client) == before


def test_status_of_what_somebody_else_made(run, client):
    client("logs").create_log_group(logGroupName=LOGS)
    result = run("status")
    assert (result.status, result.lines[-1]) == (0, f"not made by this program: the log group {LOGS}")


def test_policy_lets_the_graph_servers_invoke_exactly_this_function(run):
    assert json.loads(run("policy").out) == {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": "lambda:InvokeFunction", "Resource": FUNCTION_ARN},
        ],
    }


def test_policy_of_the_deployer_has_all_that_deploy_calls(run):
    statements = json.loads(run("policy", "--of", "deployer").out)["Statement"]
    allowed = {action: one["Resource"] for one in statements for action in one["Action"]}
    sources = [Path(module.__file__).read_text() for module in (deployed, functions)]
    called = {
        f"{service}:{operation}"
        for source in sources
        for service, operation in re.findall(r'"(lambda|iam|logs|ec2)",\s*"([A-Z]\w+)"', source)
    }
    assert len(called) > 15
    assert called <= set(allowed)
    extra = {"lambda:ListTags", "iam:TagRole", "iam:PassRole", "logs:TagResource"}
    network = {action for action in allowed if action.startswith("ec2:")}
    assert set(allowed) - called == extra | network - {"ec2:DescribeNetworkInterfaces"}
    everywhere = {action for action, resources in allowed.items() if resources == ["*"]}
    assert everywhere == network | {"logs:DescribeLogGroups"}
    assert allowed["iam:PassRole"] == [ROLE_ARN]
    assert allowed["lambda:DeleteFunction"] == [FUNCTION_ARN]


def test_names_in_another_partition():
    names = Names("f", "cn-north-1", "1", "aws-cn")
    assert names.function_arn == "arn:aws-cn:lambda:cn-north-1:1:function:f"
    assert names.role_arn == "arn:aws-cn:iam::1:role/f-cn-north-1"


# ---- down ----


@pytest.fixture
def interface(client):
    ec2 = client("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    made = ec2.create_network_interface(SubnetId=subnet, Description=ENI)
    ec2.create_network_interface(SubnetId=subnet, Description=ENI.replace(NAME, f"{NAME}-other"))
    return made["NetworkInterface"]["NetworkInterfaceId"]


def test_down_removes_all_and_only_what_up_made(run, client, archive):
    run("up", "--archive", archive, function="other")
    other = everything(client)
    run("up", "--archive", archive, "--concurrency", 5, *VPC)
    result = run("down")
    assert result.status == 0
    assert result.lines == [
        f"delete function {NAME}",
        f"delete log group {LOGS}",
        f"delete policy 'logs' of role {ROLE}",
        f"delete policy 'network' of role {ROLE}",
        f"delete role {ROLE}",
        f"function {NAME} and what belonged to it are gone",
    ]
    assert everything(client) == other
    result = run("down")
    assert (result.status, len(result.lines)) == (0, 1)
    assert "nothing to remove" in result.out


def test_down_goes_on_where_something_is_gone(run, client, archive):
    run("up", "--archive", archive)
    client("lambda").delete_function(FunctionName=NAME)
    client("iam").delete_role_policy(RoleName=ROLE, PolicyName="logs")
    assert run("down").lines[:-1] == [f"delete log group {LOGS}", f"delete role {ROLE}"]
    assert everything(client) == ({}, {}, {})


def test_what_disappears_between_look_and_call_counts_as_deleted(url):
    with Aws(REGION, endpoint_url=url) as calls:
        calls.change("x", "lambda", "DeleteFunction", FunctionName=NAME)
        calls.change("x", "iam", "DeleteRole", RoleName=ROLE)
        assert calls.changes == []


def test_down_waits_for_the_interfaces_before_it_takes_the_role(url, client, run, archive, interface):
    run("up", "--archive", archive, *VPC)
    paused = []

    def pause(seconds):
        paused.append(seconds)
        assert ROLE in everything(client)[2]
        if len(paused) == 3:
            client("ec2").delete_network_interface(NetworkInterfaceId=interface)

    with Aws(REGION, endpoint_url=url, pause=pause) as calls:
        Deployment(calls, Settings(NAME)).down(wait=100.0)
    assert paused == [10.0] * 3
    assert everything(client) == ({}, {}, {})


def test_down_that_cannot_wait_keeps_the_role_and_goes_on_later(run, client, archive, interface):
    run("up", "--archive", archive, *VPC)
    result = run("down", "--wait", 0)
    assert result.status == 1
    assert f"Lambda still has {interface} and needs the role {ROLE}" in result.err
    assert f"done before: delete function {NAME}, delete log group {LOGS}; to go on: " in result.err
    assert everything(client) == ({}, {}, {ROLE: ["logs", "network"]})
    client("ec2").delete_network_interface(NetworkInterfaceId=interface)
    assert run("down", "--wait", 0).status == 0
    assert everything(client) == ({}, {}, {})


# ---- failures ----


def test_a_failure_midway_tells_what_was_made_and_how_to_remove_it(run, client, archive, monkeypatch):
    monkeypatch.setenv("MOTO_LAMBDA_CONCURRENCY_QUOTA", "1000")
    result = run("up", "--archive", archive, "--concurrency", 950)
    assert result.status == 1
    (line,) = result.err.splitlines()
    assert "lambda PutFunctionConcurrency: InvalidParameterValueException: Specified" in line
    assert f"done before: create log group {LOGS}, keep logs" in line
    assert f"create function {NAME}; to remove all of it: python -m dorylus_hpc.deploy down" in line
    assert [len(part) for part in everything(client)] == [1, 1, 1]
    again = run("up", "--archive", archive, "--concurrency", 900)
    assert again.lines[0] == f"reserve a concurrency of 900 for function {NAME}"
    command = shlex.split(line.split("to remove all of it: ")[1])
    assert deploy.main(command[3:]) == 0
    assert everything(client) == ({}, {}, {})


def test_up_waits_until_aws_believes_in_a_role(url, client, archive):
    """Moto, like AWS, says of a role that it does not know that it cannot be assumed."""
    paused, said = [], []

    def pause(seconds):
        paused.append(seconds)
        if len(paused) == 3:
            client("iam").create_role(RoleName="late", AssumeRolePolicyDocument="{}")

    settings = Settings(NAME, role=f"arn:aws:iam::{ACCOUNT}:role/late")
    with Aws(REGION, endpoint_url=url, pause=pause, say=said.append) as calls:
        Deployment(calls, settings).up(lambda settings: upload.read_archive(archive))
    assert paused == [1, 2, 4]
    assert [line for line in said if "waiting" in line] == [
        "waiting for AWS: lambda CreateFunction: InvalidParameterValueException: "
        "The role defined for the function cannot be assumed by Lambda."
    ]
    assert client("lambda").get_function(FunctionName=NAME)["Configuration"]["Role"] == settings.role


def test_up_does_not_wait_for_ever(url, archive):
    paused = []
    with Aws(REGION, endpoint_url=url, pause=paused.append) as calls:
        deployment = Deployment(calls, Settings(NAME, role=f"arn:aws:iam::{ACCOUNT}:role/never"))
        with pytest.raises(AwsError, match="cannot be assumed"):
            deployment.up(lambda settings: upload.read_archive(archive))
        assert [change.operation for change in calls.changes] == ["CreateLogGroup", "PutRetentionPolicy"]
    assert 60 <= sum(paused) <= 120


class Changing:
    """Stands for AWS while a function goes through states."""

    dry_run = False

    def __init__(self, *states):
        self.states = list(states)
        self.paused = 0

    def read(self, service, operation, **parameters):
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return None if state is None else {"Configuration": state}

    def pause(self, seconds):
        self.paused += 1


def settle(*states):
    deployment = Deployment.__new__(Deployment)
    deployment._aws = Changing(*states)
    deployment.names = Names(NAME, REGION, ACCOUNT)
    deployment._settled()
    return deployment._aws.paused


def test_up_waits_until_the_function_is_ready():
    ready = {"State": "Active", "LastUpdateStatus": "Successful"}
    changing = {"State": "Active", "LastUpdateStatus": "InProgress"}
    assert settle({"State": "Pending"}, {"State": "Pending"}, changing, ready) == 3
    assert settle({"State": "Inactive", "LastUpdateStatus": "Successful"}) == 0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"State": "Failed", "StateReason": "no such\nsubnet"}, "failed: no such subnet"),
        ({"State": "Active", "LastUpdateStatus": "Failed"}, "failed: no reason given"),
        ({"State": "Pending"}, "is not ready after 600 s"),
        (None, "has disappeared"),
    ],
)
def test_a_function_that_does_not_get_ready(state, message):
    with pytest.raises(AwsError, match=f"^the function {NAME} {message}$"):
        settle(state)


def test_no_credentials(run, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    result = run("up")
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert "no AWS credentials: Unable to locate credentials" in result.err


@pytest.mark.parametrize(
    ("code", "kind"),
    [("ExpiredToken", InputError), ("InvalidClientTokenId", InputError), ("Other", AwsError)],
)
def test_credentials_that_aws_does_not_accept_are_the_users_to_correct(url, monkeypatch, code, kind):
    def refuse(self, service, operation, parameters):
        raise ClientError({"Error": {"Code": code, "Message": "two\nlines"}}, operation)

    monkeypatch.setattr(Aws, "_call", refuse)
    with Aws(REGION, endpoint_url=url) as calls, pytest.raises(kind, match=f"{code}: two lines$"):
        Deployment(calls, Settings(NAME))


def test_nobody_listens(run, archive, capsys):
    status = deploy.main(
        ["up", "--region", REGION, "--endpoint-url", "http://127.0.0.1:1", "--archive", str(archive)]
    )
    error = capsys.readouterr().err
    assert status == 1
    assert "sts GetCallerIdentity: Could not connect to the endpoint" in error
    assert error.endswith("; nothing was changed\n")


def test_stopped_by_the_user(run, archive, monkeypatch):
    def stop(self, *rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(Deployment, "_create", stop)
    result = run("up", "--archive", archive)
    assert result.status == 130
    assert f"error: stopped; done before: create log group {LOGS}" in result.err


def test_without_boto3(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "dorylus_hpc.serverless.aws")
    assert deploy.main(["status"]) == 2
    assert "pip install 'dorylus_hpc[lambda]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "are required: up|status|down|policy"),
        (["sideways"], "invalid choice: 'sideways'"),
        (["up", "--memory-mb", "127"], "--memory-mb: must be a whole number from 128 to 10240, got '127'"),
        (["up", "--timeout", "901"], "--timeout: must be a whole number from 1 to 900, got '901'"),
        (["up", "--concurrency", "0"], "--concurrency: must be a whole number >= 1 or none, got '0'"),
        (["up", "--vpc-subnets", "sg-1", "--vpc-security-groups", "sg-1"], "must be subnet-... ids"),
        (["up", "--vpc-subnets", "subnet-1"], "--vpc-subnets and --vpc-security-groups go together"),
        (["up", "--vpc-subnets", "none", "--vpc-security-groups", "sg-1"], "go together"),
        (["up", "--role", "admin"], "--role: must be arn:aws:iam::ACCOUNT:role/NAME, got 'admin'"),
        (["up", "--python", "3.9"], "invalid choice: '3.9'"),
        (["down", "--memory-mb", "512"], "--memory-mb is for up and status, not for down"),
        (["status", "--dry-run"], "--dry-run is for up and down, not for status"),
        (["up", "--of", "deployer"], "--of is for policy, not for up"),
        (["policy", "--wait", "1"], "--wait is for down, not for policy"),
        (["up", "--log-days", "8"], "--log-days must be one of 1, 3, 5, 7"),
        (["up", "--function", "a b"], "--function 'a b': only letters, digits, - and _"),
        (["up", "--function", "f" * 55], "is 55 characters long; at most 54 in eu-west-1"),
        (["up", "--endpoint-url", "nowhere"], "Invalid endpoint: nowhere"),
        (["up", "--region", ""], "--region is missing"),
        (["up", "--mem", "512"], "unrecognized arguments"),
    ],
)
def test_wrong_use(url, capsys, arguments, message):
    region = [] if "--region" in arguments else ["--region", REGION]
    where = [] if "--endpoint-url" in arguments else ["--endpoint-url", url]
    assert deploy.main([*arguments, *region, *where]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


class _Nonsense(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *arguments):
        pass


@pytest.mark.parametrize("body", [b"<html><h1>It works!</h1></html>", b"null", b"[1]", b"[" * 100_000])
def test_an_endpoint_that_is_none_of_aws(url, capsys, body):
    with http.server.HTTPServer(("127.0.0.1", 0), _Nonsense) as server:
        server.body = body
        threading.Thread(target=server.serve_forever).start()
        where = f"http://127.0.0.1:{server.server_address[1]}"
        status = deploy.main(["up", "--region", REGION, "--endpoint-url", where])
        server.shutdown()
    said = capsys.readouterr().err
    assert status == 1 and said.count("\n") == 1 and len(said) < 400
    assert "error: sts GetCallerIdentity: an answer that AWS does not give: " in said


def test_an_archive_that_cannot_be_read(url, capsys, tmp_path):
    broken = tmp_path / "broken.zip"
    with zipfile.ZipFile(broken, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("lambda_pkg/handler.py", "")
        opened.writestr("lambda_pkg/__init__.py", "VERSION = 1\n" * 100)
    content = bytearray(broken.read_bytes())
    start = content.rindex(b"lambda_pkg/__init__.py", 0, content.index(b"PK\x01\x02")) + 22
    content[start : start + 8] = b"\xff" * 8
    broken.write_bytes(content)
    for path, words in ((broken, "cannot be read as a zip file"), ("/dev/zero", "is no file")):
        arguments = ["up", "--region", REGION, "--endpoint-url", url, "--archive", str(path)]
        assert deploy.main(arguments) == 2
        said = capsys.readouterr().err
        assert f"{path} {words}" in said and said.count("\n") == 1


def test_the_region_is_that_of_the_users_configuration(url, capsys, monkeypatch):
    assert deploy.main(["policy", "--endpoint-url", url]) == 2
    assert "--region is missing" in capsys.readouterr().err
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    assert deploy.main(["policy", "--endpoint-url", url]) == 0
    assert ":us-west-2:" in capsys.readouterr().out


# ---- archives ----


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"no zip"), "cannot be read as a zip file"),
        (lambda path: None, "cannot be read as a zip file: .*No such file"),
        (
            lambda path: write_archive(path, version="0"),
            f"is of version 0, this is {lambda_pkg.VERSION}: build it anew",
        ),
        (lambda path: zipfile.ZipFile(path, "w").close(), "is no archive of lambda_pkg: .*handler.py"),
    ],
)
def test_what_is_no_archive_is_refused_before_anything_is_made(run, client, tmp_path, make, message):
    path = tmp_path / "some.zip"
    make(path)
    result = run("up", "--archive", path)
    assert result.status == 2
    assert re.search(message, result.err)
    assert everything(client) == ({}, {}, {})


def test_an_archive_for_another_runtime_is_refused(run, client, tmp_path):
    name = "numpy/_core/_multiarray_umath.cpython-312-aarch64-linux-gnu.so"
    path = write_archive(tmp_path / "other.zip", **{name: ""})
    result = run("up", "--archive", path)
    assert result.status == 2
    assert "is for Python 3.12 on arm64, the function for Python 3.13 on x86_64" in result.err
    assert run("up", "--archive", path, "--python", "3.12", "--arch", "arm64").status == 0


def test_without_an_archive_one_is_built_for_the_function(run, client, monkeypatch):
    from dorylus_hpc.serverless import archive as builder

    asked = []

    def download(folder, *, arch, python):
        asked.append((arch, python))
        return "wheel"

    def build(target, *, source):
        assert source == "wheel"
        write_archive(target)

    monkeypatch.setattr(builder, "download_wheel", download)
    monkeypatch.setattr(builder, "build", build)
    assert run("up", "--arch", "arm64").status == 0
    assert run("up").lines == [f"nothing to change: function {NAME} is as wanted"]
    assert asked == [("arm64", "3.13")] * 2
