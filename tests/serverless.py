"""What the tests of the Lambda back end share: counters that must add up, archives that are not ours."""

from __future__ import annotations

from dorylus_hpc.serverless.archive import link_installed

VERSION_0 = 'VERSION = "0"\n'


def assert_adds_up(account, tasks):
    """Assert what must hold between the counters of a `LambdaAccount` at any time."""
    assert account.tasks == tasks
    assert account.invocations == account.invoked + account.retries + account.throttles
    assert tasks - account.fallbacks <= account.invoked <= tasks
    assert account.failures + account.throttles <= account.invocations


def other_archive(folder, name, text):
    """Make an unpacked archive in which a file of `lambda_pkg` has another text."""
    link_installed(folder)
    path = folder / "lambda_pkg" / name
    path.unlink()  # a link to ours
    path.write_text(text)
    return folder
