"""Names and IAM documents: who may do what around the function, and no more than that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dorylus_hpc.errors import InputError

LOGS_POLICY, NETWORK_POLICY = "logs", "network"
_NETWORK_ACTIONS = (
    "ec2:CreateNetworkInterface",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSubnets",
    "ec2:DeleteNetworkInterface",
    "ec2:AssignPrivateIpAddresses",
    "ec2:UnassignPrivateIpAddresses",
)
_ROLE_NAME_MAX = 64


@dataclass(frozen=True)
class Names:
    """What things are called, in the account at hand."""

    function: str
    region: str
    account: str
    partition: str = "aws"

    @property
    def log_group(self) -> str:
        """The log group, where AWS looks for it."""
        return f"/aws/lambda/{self.function}"

    @property
    def role(self) -> str:
        """The role; roles know no regions, so that it carries its own."""
        return f"{self.function}-{self.region}"

    @property
    def function_arn(self) -> str:
        """The function, whatever its version."""
        return f"arn:{self.partition}:lambda:{self.region}:{self.account}:function:{self.function}"

    @property
    def log_group_arn(self) -> str:
        """The log group."""
        return f"arn:{self.partition}:logs:{self.region}:{self.account}:log-group:{self.log_group}"

    @property
    def role_arn(self) -> str:
        """The role."""
        return f"arn:{self.partition}:iam::{self.account}:role/{self.role}"


def check_name(name: str, region: str) -> None:
    """Refuse a name of which no function, or no role, can be made."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise InputError(f"--function {name!r}: only letters, digits, - and _")
    limit = _ROLE_NAME_MAX - len(region) - 1
    if len(name) > limit:
        raise InputError(f"--function {name!r} is {len(name)} characters long; at most {limit} in {region}")


# What `deploy` calls, and what AWS asks for beside it: for tags, and for giving Lambda the role.
_DEPLOYER_FUNCTION = (
    "CreateFunction GetFunction UpdateFunctionConfiguration UpdateFunctionCode DeleteFunction "
    "PutFunctionConcurrency DeleteFunctionConcurrency TagResource ListTags"
)
_DEPLOYER_ROLE = (
    "CreateRole GetRole UpdateAssumeRolePolicy DeleteRole TagRole "
    "PutRolePolicy GetRolePolicy DeleteRolePolicy"
)
_DEPLOYER_LOGS = "CreateLogGroup PutRetentionPolicy DeleteLogGroup ListTagsForResource TagResource"
_DEPLOYER_NETWORK = (
    "DescribeNetworkInterfaces DescribeSecurityGroups DescribeSubnets DescribeVpcs GetSecurityGroupsForVpc"
)


def _document(*statements: Mapping[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def trust_policy() -> dict[str, Any]:
    """Return who may take the function's role: Lambda."""
    return _document(
        {
            "Effect": "Allow",
            "Principal": {"Service": "lambda.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    )


def role_policies(names: Names, *, network: bool) -> dict[str, dict[str, Any]]:
    """Return what the function's role may do, by the policies' names.

    Lambda itself uses the role to connect the function to a VPC, and asks for these actions on all
    resources; the function's own code is denied them.
    """
    policies = {
        LOGS_POLICY: _document(
            {
                "Effect": "Allow",
                "Action": ["logs:CreateLogStream", "logs:PutLogEvents"],
                "Resource": f"{names.log_group_arn}:*",
            }
        )
    }
    if network:
        actions = list(_NETWORK_ACTIONS)
        policies[NETWORK_POLICY] = _document(
            {"Effect": "Allow", "Action": actions, "Resource": "*"},
            {
                "Effect": "Deny",
                "Action": actions,
                "Resource": "*",
                "Condition": {"ArnEquals": {"lambda:SourceFunctionArn": names.function_arn}},
            },
        )
    return policies


def caller_policy(names: Names) -> dict[str, Any]:
    """Return what the graph servers need: to invoke this function, and nothing else."""
    return _document({"Effect": "Allow", "Action": "lambda:InvokeFunction", "Resource": names.function_arn})


def deployer_policy(names: Names) -> dict[str, Any]:
    """Return what `deploy` itself needs; the part of EC2 only for a function in a VPC."""

    def allow(service: str, operations: str, *resources: str, **more: Any) -> dict[str, Any]:
        actions = [f"{service}:{operation}" for operation in operations.split()]
        return {"Effect": "Allow", "Action": actions, "Resource": list(resources), **more}

    return _document(
        allow("lambda", _DEPLOYER_FUNCTION, names.function_arn),
        allow("iam", _DEPLOYER_ROLE, names.role_arn),
        allow(
            "iam",
            "PassRole",
            names.role_arn,
            Condition={"StringEquals": {"iam:PassedToService": "lambda.amazonaws.com"}},
        ),
        allow("logs", _DEPLOYER_LOGS, names.log_group_arn, f"{names.log_group_arn}:*"),
        allow("logs", "DescribeLogGroups", "*"),
        allow("ec2", _DEPLOYER_NETWORK, "*"),
    )
