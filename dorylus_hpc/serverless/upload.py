"""The code of a function on its way to AWS: checked, then sent in a call or through a bucket."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lambda_pkg
from dorylus_hpc.errors import InputError
from dorylus_hpc.serverless.archive import MAX_UNZIPPED, MAX_ZIPPED, UNREADABLE
from dorylus_hpc.serverless.aws import Aws


@dataclass(frozen=True)
class Archive:
    """The code to upload."""

    data: bytes = field(repr=False)
    version: str
    built_for: frozenset[tuple[str, str]] = frozenset()  # Pythons and machines of compiled modules

    def check(self, python: str | None, arch: str | None) -> None:
        """Refuse code that a function with this runtime and processor cannot load."""
        if wrong := sorted(self.built_for - {(python, arch)}):
            raise InputError(
                f"the archive is for Python {wrong[0][0]} on {wrong[0][1]}, the function for Python "
                f"{python} on {arch}: build another archive, or change --python and --arch"
            )

    @property
    def sha256(self) -> str:
        """The hash of the code as AWS gives it."""
        return base64.b64encode(hashlib.sha256(self.data).digest()).decode()


def read_archive(path: Path) -> Archive:
    """Return an archive that `dorylus_hpc.serverless.archive` has built.

    Raises
    ------
    InputError
        It is none, was built by another version, or is larger than AWS takes.
    """
    if path.exists() and not path.is_file():  # a device may have no end
        raise InputError(f"{path} is no file")
    try:
        data = path.read_bytes()
        with zipfile.ZipFile(path) as opened:
            unzipped = sum(entry.file_size for entry in opened.infolist())
            opened.getinfo("lambda_pkg/handler.py")
            source = opened.read("lambda_pkg/__init__.py").decode(errors="replace")
            modules = [re.search(r"\.cpython-3(\d+)-(\w+)-linux", name) for name in opened.namelist()]
    except KeyError as error:
        raise InputError(f"{path} is no archive of lambda_pkg: {error.args[0]}") from error
    except UNREADABLE as error:
        raise InputError(f"{path} cannot be read as a zip file: {error}") from error
    found = re.search(r'^VERSION = "([^"]+)"', source, re.MULTILINE)
    version = found[1] if found else "none"
    if version != lambda_pkg.VERSION:
        raise InputError(f"{path} is of version {version}, this is {lambda_pkg.VERSION}: build it anew")
    if unzipped > MAX_UNZIPPED:
        raise InputError(f"{path} is {unzipped} bytes unzipped; AWS Lambda takes {MAX_UNZIPPED}")
    built_for = {(f"3.{one[1]}", {"aarch64": "arm64"}.get(one[2], one[2])) for one in modules if one}
    return Archive(data, version, frozenset(built_for))


class Upload:
    """Gives the parameters by which a call names new code; empty without any. A context manager."""

    def __init__(self, calls: Aws, function: str, code: Archive | None, bucket: str | None) -> None:
        self._aws = calls
        self._code = code
        self._bucket = bucket if code is not None and len(code.data) > MAX_ZIPPED else None
        digest = hashlib.sha256(code.data).hexdigest() if code is not None else ""
        self._place = {"Bucket": self._bucket, "Key": f"dorylus_hpc/{function}-{digest[:16]}.zip"}

    def __enter__(self) -> dict[str, Any]:
        """Upload the code to a bucket, if it goes through one."""
        if self._code is None:
            return {}
        if self._bucket is None:
            return {"ZipFile": self._code.data}
        where = "/".join(filter(None, self._place.values()))
        self._aws.change(f"upload to {where}", "s3", "PutObject", Body=self._code.data, **self._place)
        return {"S3Bucket": self._bucket, "S3Key": self._place["Key"]}

    def __exit__(self, *details: object) -> None:
        """Remove it from the bucket: Lambda has its own copy."""
        if self._bucket is not None:
            self._aws.change("remove the upload", "s3", "DeleteObject", **self._place)
