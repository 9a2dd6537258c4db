"""The first thing that runs in a sandbox: what AWS has around the runtime client.

Run as a script, isolated (``-I -S``) and with nothing of ours to import. It ties the process to the
service, sets the import path as Lambda has it (the archive, the standard library, the runtime), lays the
modelled line under the sockets, and becomes ``awslambdaric``.
"""

import ctypes
import errno
import importlib
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1
# What the network model needs to know; taken out of the environment before any code of the function runs.
PARENT, NETWORK, RUNTIME = "_LOCAL_PARENT", "_LOCAL_NETWORK", "_LOCAL_RUNTIME"


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the service ends, whatever it ends of."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def lay_line(port: int, token: bytes) -> None:
    """Lead every TCP connection that Python code opens through the service's line.

    The line is told where to, and answers with an error number once it has tried. The runtime client
    itself connects in C and is not led through it.
    """
    import _socket
    import socket

    plain = _socket.socket  # also below a TLS socket, before its handshake

    def through(self: socket.socket, address: tuple) -> int:
        """Connect; return the error number of the connection, or 0."""
        timeout = self.gettimeout()
        if timeout == 0:
            self.settimeout(None)  # the line answers at once or within its latency
        try:
            plain.connect(self, ("127.0.0.1", port))
            plain.sendall(self, token + f"{address[0]}\n{address[1]}\n".encode())
            answer = plain.recv(self, 1)
        finally:
            if timeout == 0:
                self.settimeout(0)
        return answer[0] if answer else errno.ECONNRESET

    def connect(self: socket.socket, address: tuple) -> None:
        if self.type != socket.SOCK_STREAM or self.family not in (socket.AF_INET, socket.AF_INET6):
            return plain.connect(self, address)
        # The line is IPv4 only; create_connection goes on to that.
        if error := errno.ENETUNREACH if self.family == socket.AF_INET6 else through(self, address):
            raise OSError(error, os.strerror(error))
        return None

    def connect_ex(self: socket.socket, address: tuple) -> int:
        try:
            connect(self, address)
        except OSError as error:
            return error.errno or errno.ETIMEDOUT
        return 0

    socket.socket.connect = connect  # type: ignore[method-assign,assignment]
    socket.socket.connect_ex = connect_ex  # type: ignore[method-assign,assignment]


def main() -> None:
    """Set everything up and run the handler that the command line names."""
    die_with(int(os.environ.pop(PARENT)))
    sys.path.insert(0, os.environ["LAMBDA_TASK_ROOT"])
    sys.path.append(os.environ.pop(RUNTIME))
    network = os.environ.pop(NETWORK, "")
    if network:
        port, token = network.split(":")
        lay_line(int(port), token.encode())
    importlib.import_module("awslambdaric.__main__").main(sys.argv)


if __name__ == "__main__":
    main()
