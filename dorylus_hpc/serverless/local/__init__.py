"""A local AWS Lambda: the same client, archive and runtime, so that only address and credentials differ.

``LocalService`` runs it as a child process; ``python -m dorylus_hpc.serverless.local`` runs it alone. The
picture, with one process to the left of each arrow and one to the right::

    boto3 --- Invoke, signed ---> service --- runtime API, one port a sandbox ---> awslambdaric + archive
                                  service <-- its other connections -- (with a modelled network)

A sandbox is a process of its own session with an environment made from scratch. The rest says where:
`settings` what can be chosen, `start` the child process, `service` the Invoke API, `signature` who may
call, `pool` which sandbox gets a call, `sandbox` one of them, `limits` its memory and processor,
`network` its line, `faults` what is made to go wrong, `bootstrap` the first thing that runs in it.
"""

from dorylus_hpc.serverless.local.faults import Faults
from dorylus_hpc.serverless.local.settings import LocalSettings
from dorylus_hpc.serverless.local.start import LocalService

__all__ = ["Faults", "LocalService", "LocalSettings"]
