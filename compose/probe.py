"""`python probe.py PORT PATH`: exit 0 if this container's own service answers 200 there, else 1 with what it said.

The health check of every container. It loads only `socket`: it runs every few seconds, beside the work.
"""

import socket
import sys

TIMEOUT_S = 3.0


def probe(port: int, path: str) -> str:
    """The first line of the answer. Raises OSError if nobody answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
    head, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
    return f"{head.splitlines()[0] if head else 'no answer'} {body.strip()[:500]}"


def main() -> int:
    """Answer the command line."""
    _, port, path = sys.argv
    try:
        answer = probe(int(port), path)
    except OSError as error:
        answer = f"no answer: {error}"
    print(answer)
    return 0 if answer.partition(" ")[2].startswith("200 ") else 1


if __name__ == "__main__":
    sys.exit(main())
