"""What exists at AWS under the names of a function, and whether it was made by this program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dorylus_hpc.serverless.aws import Aws
from dorylus_hpc.serverless.policies import LOGS_POLICY, NETWORK_POLICY, Names, check_name

MADE_BY, PROGRAM = "made-by", "dorylus_hpc"
ARCHIVE_VERSION = "dorylus-archive"


@dataclass(frozen=True)
class Vpc:
    """Where in a network the function sits; without subnets: in none."""

    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()


def names_of(calls: Aws, function: str) -> Names:
    """Return what things are called in the caller's account."""
    check_name(function, calls.region)
    caller = calls.read("sts", "GetCallerIdentity")
    return Names(function, calls.region, caller["Account"], caller["Arn"].split(":")[1])


@dataclass(frozen=True)
class Found:
    """What exists under the names; None or empty where it does not."""

    function: Mapping[str, Any] | None = None  # as GetFunction gives it
    log_group: Mapping[str, Any] | None = None
    log_group_tags: Mapping[str, str] = field(default_factory=dict)
    role: Mapping[str, Any] | None = None
    role_policies: Mapping[str, Any] = field(default_factory=dict)

    @property
    def configuration(self) -> Mapping[str, Any]:
        """The function's configuration; empty without a function."""
        return self.function["Configuration"] if self.function else {}

    @property
    def concurrency(self) -> int | None:
        """The function's reserved concurrency; None: nothing is reserved. 0 refuses every invocation."""
        found = (self.function or {}).get("Concurrency") or {}
        return found.get("ReservedConcurrentExecutions")

    @property
    def vpc(self) -> Vpc:
        """Where in a network the function sits."""
        found = self.configuration.get("VpcConfig") or {}
        return Vpc(tuple(found.get("SubnetIds") or ()), tuple(found.get("SecurityGroupIds") or ()))

    @property
    def role_tags(self) -> dict[str, str]:
        """Tags of the role."""
        return {tag["Key"]: tag["Value"] for tag in (self.role or {}).get("Tags", ())}

    def foreign(self, names: Names) -> dict[str, str]:
        """Return what exists but was made by somebody else, by its kind."""
        each = (
            ("function", names.function, self.function, (self.function or {}).get("Tags") or {}),
            ("log group", names.log_group, self.log_group, self.log_group_tags),
            ("role", names.role, self.role, self.role_tags),
        )
        return {
            kind: f"the {kind} {name}"
            for kind, name, thing, tags in each
            if thing is not None and tags.get(MADE_BY) != PROGRAM
        }


def find(calls: Aws, names: Names) -> Found:
    """Return what exists."""
    log_group, tags = _log_group(calls, names)
    role, policies = _role(calls, names)
    function = calls.read("lambda", "GetFunction", FunctionName=names.function)
    return Found(function, log_group, tags, role, policies)


def _log_group(calls: Aws, names: Names) -> tuple[Any, Mapping[str, str]]:
    listed = calls.read("logs", "DescribeLogGroups", logGroupNamePrefix=names.log_group)
    for group in listed["logGroups"]:
        if group["logGroupName"] == names.log_group:
            answer = calls.read("logs", "ListTagsForResource", resourceArn=names.log_group_arn)
            return group, (answer or {}).get("tags", {})
    return None, {}


def _role(calls: Aws, names: Names) -> tuple[Any, Mapping[str, Any]]:
    answer = calls.read("iam", "GetRole", RoleName=names.role)
    if answer is None:
        return None, {}
    policies = {}
    for name in (LOGS_POLICY, NETWORK_POLICY):
        policy = calls.read("iam", "GetRolePolicy", RoleName=names.role, PolicyName=name)
        if policy is not None:
            policies[name] = policy["PolicyDocument"]
    return answer["Role"], policies


def interfaces(calls: Aws, names: Names) -> list[str]:
    """Return the network interfaces that Lambda has for the function."""
    prefix = f"AWS Lambda VPC ENI-{names.function}-"
    exact = re.compile(re.escape(prefix) + r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
    found = calls.read(
        "ec2", "DescribeNetworkInterfaces", Filters=[{"Name": "description", "Values": [f"{prefix}*"]}]
    )
    listed = found["NetworkInterfaces"]
    return [one["NetworkInterfaceId"] for one in listed if exact.fullmatch(one.get("Description", ""))]


def describe(found: Found, names: Names) -> Iterator[str]:
    """Give lines about what exists."""
    if found.function is None:
        yield f"function   {names.function}: not there"
    else:
        has = found.configuration
        tags = found.function.get("Tags") or {}
        vpc = found.vpc
        reserved = {None: "none", 0: "0, which stops it"}.get(found.concurrency, found.concurrency)
        yield (
            f"function   {names.function}: {has.get('State')}, {has.get('Runtime')} on "
            f"{', '.join(has.get('Architectures') or ())}, {has.get('MemorySize')} MB, "
            f"{has.get('Timeout')} s, reserved concurrency {reserved}, "
            + (
                f"in {', '.join(vpc.subnets)} with {', '.join(vpc.security_groups)}"
                if vpc.subnets
                else "no VPC"
            )
        )
        yield f"           {names.function_arn}"
        yield (
            f"           archive of version {tags.get(ARCHIVE_VERSION, 'unknown')}, {has.get('CodeSize')} "
            f"bytes, sha256 {has.get('CodeSha256')}, changed {has.get('LastModified')}"
        )
        yield f"           role {has.get('Role')}"
    if found.log_group is None:
        yield f"log group  {names.log_group}: not there"
    else:
        days = found.log_group.get("retentionInDays")
        yield f"log group  {names.log_group}: kept for {f'{days} days' if days else 'ever'}"
    if found.role is None:
        yield f"role       {names.role}: not there"
    else:
        yield f"role       {names.role}: policies {', '.join(found.role_policies) or 'none'}"
    for thing in found.foreign(names).values():
        yield f"not made by this program: {thing}"
