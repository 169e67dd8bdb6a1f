# SPDX-License-Identifier: Apache-2.0
"""README.md does what it says: its ```sh blocks run, in their order, in one bash from the project's root, and its
```python blocks with the Python that a block before them made. What can't run here is a ```console block, and
CONSOLE says why. Uses the server's default ports, so nothing else may serve there.
"""
import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

from support.servers import Process, ROOT, eventually

# First words of commands in ```console blocks, and why they are not run.
CONSOLE = {
    "tests/run.sh": "runs this very test",
    "tests/gpu/run.sh": "needs a GPU; tests/gpu/run_test.py packs, and runs it up to there",
    "build/bin/attend": "bench --echo, --check: minutes; tests/client runs them against a real server and echo",
    "build/bin/attend-bench": "minutes; a block before it runs one case",
    "build/bin/attend-echo": "see attend",
    "build/bin/attend-server": "see attend; blocks that run start one, too",
    "python3": "peers.py needs 5 GB of other projects' packages; tests/bench/peers_test.py runs the rest of it",
    "grpcurl": "is in no Debian package; tests/integration asks the reflection it uses",
    "docker": "needs a Docker engine; container_test.py builds and runs the same Dockerfile",
    "kubectl": "apply and rollout need a cluster; kubernetes_test.py checks what would be applied",
}
# Servers, their HTTP, the balancers' own, nginx's gates, Prometheus.
PORTS = (*range(50050, 50054), *range(9464, 9467), *range(9564, 9567), 9090)


def reserved(port):
    """A socket that keeps outgoing connections from taking `port`, and lets servers listen there. Waits until one that
    has taken it is gone: ended ones keep their port for a minute."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def bound():
        with contextlib.suppress(OSError):
            held.bind(("0.0.0.0", port))
            return True

    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is taken; the README's commands need it"
    eventually(bound, 150, f"port {port} without a connection from it")
    return held


def blocks(text):
    """(language, body, line number) of each fenced block."""
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        found.append((match[1], match[2], text.count("\n", 0, match.start()) + 1))
    return found


README = (ROOT / "README.md").read_text()


def script():
    """All blocks that run, as one bash script that says where it is."""
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT",
             "trap 'exit 143' TERM"]
    for language, body, number in blocks(README):
        if language == "sh":
            lines += [f"echo '== README.md:{number}'", body]
        elif language == "python":
            lines += [f"echo '== README.md:{number}'", "build/python/bin/python - <<'END_OF_BLOCK'", body, "END_OF_BLOCK"]
    return "\n".join(lines)


def test_every_command_that_is_not_run_has_a_reason():
    for language, body, number in blocks(README):
        assert language in ("sh", "python", "console", "cmake", "text"), f"README.md:{number}: ```{language}"
        if language == "console":
            for command in re.findall(r"^\$ (\S+)", body, re.MULTILINE):
                assert command in CONSOLE, f"README.md:{number}: {command} is not run and has no reason"


def test_indented_blocks_hide_no_commands():
    """Commands stand in fenced blocks, or nothing would run them."""
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^    \S*(?:bin/|deploy/|tests/|docker |kubectl |pip |curl ).*$", prose, re.MULTILINE)


def test_commands_of_the_readme_run(tmp_path):
    ports = [reserved(port) for port in PORTS]
    path = f"{os.environ['PATH']}:{pathlib.Path(sys.executable).parent}"  # kubectl is in the second
    with Process(["bash", "-c", script()], tmp_path / "output", env={"PATH": path}, cwd=ROOT) as bash:
        try:
            code = bash.wait(1500)
        except subprocess.TimeoutExpired:
            bash.signal()  # it ends what it started
            code = bash.wait()
    for port in ports:
        port.close()
    print(bash.log()[-20000:])
    assert code == 0, "the block after the last '== README.md:LINE' failed"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#][^)]*)\)", README))))
def test_links_lead_somewhere(link):
    path, _, anchor = link.partition("#")
    assert (ROOT / path).exists(), path


def anchors():
    """The anchors that headings get on the usual hosts: lower case, spaces to dashes, punctuation dropped."""
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)]


def test_anchors_are_there():
    for anchor in re.findall(r"\]\(#([^)]*)\)", README):
        assert anchor in anchors(), anchor
