"""What a run on AWS Lambda needs there: the function, its role, its log group. Made, compared, removed.

Everything is looked at first and only differences are changed, so that doing it again changes nothing, and
an interrupted `up` is finished by the next one. What was made carries tags; what does not carry them is
somebody else's and is never touched. ::

    log group   /aws/lambda/NAME     made beforehand: the function itself may only write into it
    role        NAME-REGION          may write there and, in a VPC, have network interfaces
    function    NAME                 with the reserved concurrency
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lambda_pkg
from dorylus_hpc.errors import InputError
from dorylus_hpc.serverless.archive import HANDLER, MAX_ZIPPED
from dorylus_hpc.serverless.aws import Aws, AwsError
from dorylus_hpc.serverless.deployed import (
    ARCHIVE_VERSION,
    MADE_BY,
    PROGRAM,
    Found,
    Vpc,
    find,
    interfaces,
    names_of,
)
from dorylus_hpc.serverless.policies import NETWORK_POLICY, role_policies, trust_policy
from dorylus_hpc.serverless.upload import Archive, Upload

ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}  # one BLAS thread a task, everywhere
_LOG_DAYS = "1 3 5 7 14 30 60 90 120 150 180 365 400 545 731 1096 1827 2192 2557 2922 3288 3653"
LOG_DAYS = tuple(int(days) for days in _LOG_DAYS.split())  # what AWS offers

_POLL, _POLLS = 2, 300  # seconds between looks at a function that is changing, and how many

# ---- what is wanted ----


@dataclass(frozen=True)
class Settings:
    """The function that is wanted. None leaves a value as it is deployed, or takes the default.

    Attributes
    ----------
    name
        Of the function.
    memory_mb, timeout, arch, python
        By default 1769 MB (a whole CPU), 60 s, x86_64, 3.13.
    concurrency
        Invocations at a time that are reserved for the function, and its limit; 0: neither.
    vpc
        By default none.
    role
        ARN of a role that somebody else made; by default one is made.
    log_days
        How long logs are kept; by default 14.
    """

    name: str
    memory_mb: int | None = None
    timeout: int | None = None
    arch: str | None = None
    python: str | None = None
    concurrency: int | None = None
    vpc: Vpc | None = None
    role: str | None = None
    log_days: int | None = None


DEFAULTS = Settings("", 1769, 60, "x86_64", "3.13", 0, Vpc(), None, 14)


# ---- what is done for it ----


class Deployment:
    """A function and what belongs to it, in one account and region.

    Parameters
    ----------
    calls
        To AWS.
    settings
        The function that is wanted.
    """

    def __init__(self, calls: Aws, settings: Settings) -> None:
        self._aws = calls
        self._settings = settings
        self.names = names_of(calls, settings.name)

    # ---- up ----

    def deployed(self, found: Found) -> Settings:
        """Return the settings with what they leave open taken from the function, or else the defaults."""
        configuration, wanted = found.configuration, self._settings
        there = {
            "memory_mb": configuration.get("MemorySize"),
            "timeout": configuration.get("Timeout"),
            "arch": (configuration.get("Architectures") or [None])[0],
            "python": (configuration.get("Runtime") or "").removeprefix("python") or None,
            "concurrency": found.concurrency,
            "vpc": found.vpc if found.function else None,
            "role": configuration.get("Role"),
            "log_days": (found.log_group or {}).get("retentionInDays"),
        }
        values = {
            name: next(
                (one for one in (getattr(wanted, name), there[name]) if one is not None),
                getattr(DEFAULTS, name),
            )
            for name in there
        }
        if values["role"] is None:
            values["role"] = self.names.role_arn
        return Settings(name=wanted.name, **values)

    def up(self, archive: Callable[[Settings], Archive | None], *, s3_bucket: str | None = None) -> Settings:
        """Make what is missing and change what differs.

        Parameters
        ----------
        archive
            Gives the code for a function like this; None leaves the function's code as it is.
        s3_bucket
            Through which an archive goes that is too large for a call; it is not left there.

        Returns
        -------
        Settings
            Of the function, nothing left open.

        Raises
        ------
        InputError
            Something of these names was made by somebody else, or the archive is too large.
        AwsError
            AWS refused something. `Aws.changes` has what was done until then.
        """
        found = find(self._aws, self.names)
        if foreign := found.foreign(self.names):
            raise InputError(
                f"made by somebody else (no tag {MADE_BY}={PROGRAM}): {', '.join(foreign.values())}; "
                "choose another --function"
            )
        settings = self.deployed(found)
        code = archive(settings)
        if code is not None:
            code.check(settings.python, settings.arch)
        if code is not None and len(code.data) > MAX_ZIPPED and s3_bucket is None:
            raise InputError(
                f"the archive has {len(code.data)} bytes, more than the {MAX_ZIPPED} that go into a call: "
                "name a bucket with --s3-bucket"
            )
        self._log_group(found, settings)
        if settings.role == self.names.role_arn:
            self._role(found, settings)
        with self._code(found, settings, code, s3_bucket) as code_parameters:
            if found.function is None:
                self._create(settings, code, code_parameters)
            else:
                self._update(found, settings, code, code_parameters)
        self._concurrency(found, settings)
        self._leave_network(found, settings)
        return settings

    def _log_group(self, found: Found, settings: Settings) -> None:
        name = self.names.log_group
        if found.log_group is None:
            self._aws.change(
                f"create log group {name}",
                "logs",
                "CreateLogGroup",
                logGroupName=name,
                tags={MADE_BY: PROGRAM},
            )
        if found.log_group is None or found.log_group.get("retentionInDays") != settings.log_days:
            self._aws.change(
                f"keep logs for {settings.log_days} days",
                "logs",
                "PutRetentionPolicy",
                logGroupName=name,
                retentionInDays=settings.log_days,
            )

    def _role(self, found: Found, settings: Settings) -> None:
        assert settings.vpc is not None
        role = self.names.role
        if found.role is None:
            self._aws.change(
                f"create role {role}",
                "iam",
                "CreateRole",
                RoleName=role,
                Description=f"Lambda function {self.names.function} in {self.names.region}",
                AssumeRolePolicyDocument=json.dumps(trust_policy()),
                Tags=[{"Key": MADE_BY, "Value": PROGRAM}],
            )
        elif found.role.get("AssumeRolePolicyDocument") != trust_policy():
            self._aws.change(
                f"correct who may take role {role}",
                "iam",
                "UpdateAssumeRolePolicy",
                RoleName=role,
                PolicyDocument=json.dumps(trust_policy()),
            )
        wanted = role_policies(self.names, network=bool(settings.vpc.subnets))
        for name, document in wanted.items():
            if found.role_policies.get(name) != document:
                self._aws.change(
                    f"put policy {name!r} into role {role}",
                    "iam",
                    "PutRolePolicy",
                    RoleName=role,
                    PolicyName=name,
                    PolicyDocument=json.dumps(document),
                )

    @staticmethod
    def _configuration(settings: Settings) -> dict[str, Any]:
        assert settings.vpc is not None
        return {
            "Role": settings.role,
            "Handler": HANDLER,
            "Runtime": f"python{settings.python}",
            "Timeout": settings.timeout,
            "MemorySize": settings.memory_mb,
            "Environment": {"Variables": ENVIRONMENT},
            "VpcConfig": {
                "SubnetIds": list(settings.vpc.subnets),
                "SecurityGroupIds": list(settings.vpc.security_groups),
            },
        }

    def _code(self, found: Found, settings: Settings, code: Archive | None, s3_bucket: str | None) -> Upload:
        there = found.configuration
        same = code is None or (
            there.get("CodeSha256") == code.sha256 and there.get("Architectures") == [settings.arch]
        )
        return Upload(self._aws, self.names.function, None if same else code, s3_bucket)

    def _create(self, settings: Settings, code: Archive | None, parameters: Mapping[str, Any]) -> None:
        assert code is not None or self._aws.dry_run
        name = self.names.function
        configuration = self._configuration(settings)
        if settings.vpc == Vpc():
            del configuration["VpcConfig"]
        self._aws.change(
            f"create function {name}",
            "lambda",
            "CreateFunction",
            FunctionName=name,
            Description="Dense tasks of dorylus_hpc",
            **configuration,
            Architectures=[settings.arch],
            Code=dict(parameters),
            Tags={MADE_BY: PROGRAM, ARCHIVE_VERSION: code.version if code else lambda_pkg.VERSION},
        )
        self._settled()

    def _update(
        self, found: Found, settings: Settings, code: Archive | None, parameters: Mapping[str, Any]
    ) -> None:
        name, there = self.names.function, found.configuration
        wanted = self._configuration(settings)
        variables = (there.get("Environment") or {}).get("Variables") or {}
        wanted["Environment"] = {"Variables": {**variables, **ENVIRONMENT}}
        new_role = settings.role == self.names.role_arn and found.role is None  # of an old name
        different = {
            key: value
            for key, value in wanted.items()
            if _comparable(key, there.get(key)) != _comparable(key, value) or (key == "Role" and new_role)
        }
        if different:
            self._aws.change(
                f"set {', '.join(different)} of function {name}",
                "lambda",
                "UpdateFunctionConfiguration",
                FunctionName=name,
                **different,
            )
            self._settled()
        if parameters:
            self._aws.change(
                f"replace the code of function {name}",
                "lambda",
                "UpdateFunctionCode",
                FunctionName=name,
                Architectures=[settings.arch],
                **parameters,
            )
            self._settled()
        if not different and not parameters:
            self._settled()  # what an earlier run has begun
        version = code.version if code else lambda_pkg.VERSION
        if ((found.function or {}).get("Tags") or {}).get(ARCHIVE_VERSION) != version:
            self._aws.change(
                f"tag function {name}: its archive is of version {version}",
                "lambda",
                "TagResource",
                Resource=self.names.function_arn,
                Tags={ARCHIVE_VERSION: version},
            )

    def _settled(self) -> None:
        """Wait until the function's change has taken effect."""
        if self._aws.dry_run:
            return
        for _ in range(_POLLS):
            found = self._aws.read("lambda", "GetFunction", FunctionName=self.names.function)
            if found is None:
                raise AwsError(f"the function {self.names.function} has disappeared")
            state = found["Configuration"]
            if state.get("State") == "Failed" or state.get("LastUpdateStatus") == "Failed":
                reason = state.get("LastUpdateStatusReason") or state.get("StateReason") or "no reason given"
                reason = " ".join(reason.split())  # in one line
                raise AwsError(f"the function {self.names.function} failed: {reason}")
            if state.get("State") != "Pending" and state.get("LastUpdateStatus") != "InProgress":
                return
            self._aws.pause(_POLL)
        raise AwsError(f"the function {self.names.function} is not ready after {_POLL * _POLLS} s")

    def _concurrency(self, found: Found, settings: Settings) -> None:
        name = self.names.function
        stopped = found.concurrency == 0 and self._settings.concurrency is None  # by somebody, on purpose
        if stopped or (settings.concurrency or None) == found.concurrency:
            return
        if settings.concurrency == 0:
            self._aws.change(
                f"reserve no concurrency for function {name}",
                "lambda",
                "DeleteFunctionConcurrency",
                FunctionName=name,
            )
            return
        self._aws.change(
            f"reserve a concurrency of {settings.concurrency} for function {name}",
            "lambda",
            "PutFunctionConcurrency",
            FunctionName=name,
            ReservedConcurrentExecutions=settings.concurrency,
        )

    def _leave_network(self, found: Found, settings: Settings) -> None:
        """Take the policy for a VPC away from a role once Lambda does not need it any more."""
        assert settings.vpc is not None
        if NETWORK_POLICY not in found.role_policies or settings.vpc.subnets:
            return
        if left := interfaces(self._aws, self.names):
            self._aws.say(
                f"policy {NETWORK_POLICY!r} stays in role {self.names.role} until Lambda has given back "
                f"{', '.join(left)}; a later up removes it"
            )
            return
        self._aws.change(
            f"delete policy {NETWORK_POLICY!r} of role {self.names.role}",
            "iam",
            "DeleteRolePolicy",
            RoleName=self.names.role,
            PolicyName=NETWORK_POLICY,
        )

    # ---- down ----

    def down(self, *, wait: float) -> list[str]:
        """Remove everything that `up` made.

        Parameters
        ----------
        wait
            Seconds for Lambda to give back the network interfaces of a function in a VPC. It needs the role
            for that, so that the role goes last.

        Returns
        -------
        list of str
            What is left because somebody else made it.

        Raises
        ------
        AwsError
            AWS refused something, or the interfaces are still there. Doing it again goes on.
        """
        names, change = self.names, self._aws.change
        found = find(self._aws, names)
        foreign = found.foreign(names)
        if found.function is not None and "function" not in foreign:
            change(
                f"delete function {names.function}", "lambda", "DeleteFunction", FunctionName=names.function
            )
        if found.log_group is not None and "log group" not in foreign:
            change(
                f"delete log group {names.log_group}", "logs", "DeleteLogGroup", logGroupName=names.log_group
            )
        if found.role is not None and "role" not in foreign:
            if NETWORK_POLICY in found.role_policies:
                self._wait_for_interfaces(wait)
            for policy in found.role_policies:
                change(
                    f"delete policy {policy!r} of role {names.role}",
                    "iam",
                    "DeleteRolePolicy",
                    RoleName=names.role,
                    PolicyName=policy,
                )
            change(f"delete role {names.role}", "iam", "DeleteRole", RoleName=names.role)
        return list(foreign.values())

    def _wait_for_interfaces(self, wait: float) -> None:
        if self._aws.dry_run:
            return
        waited = 0.0
        while left := interfaces(self._aws, self.names):
            if waited == 0:
                self._aws.say(
                    f"waiting for Lambda to give back {', '.join(left)}; that takes up to 20 minutes"
                )
            if waited >= wait:
                raise AwsError(
                    f"Lambda still has {', '.join(left)} and needs the role {self.names.role} to give "
                    f"{'it' if len(left) == 1 else 'them'} back (another function may share them): "
                    "run the same command again later"
                )
            seconds = min(10.0, wait - waited)
            self._aws.pause(seconds)
            waited += seconds


def _comparable(key: str, value: Any) -> Any:
    """Return a value of a function's configuration without what does not count."""
    if key == "VpcConfig":
        value = value or {}
        return {name: sorted(value.get(name) or ()) for name in ("SubnetIds", "SecurityGroupIds")}
    if key == "Environment":
        return (value or {}).get("Variables") or {}
    return value
