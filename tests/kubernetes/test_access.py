"""Finding the API server and showing it who we are: against a real TLS server that asks for a
certificate."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from orchestrator.backends.kubernetes.api.access import access
from orchestrator.backends.kubernetes.api.client import Cluster, gather
from orchestrator.plan import Exit
from tests.beds.bundles import refusal


class Server:
    """Answers GET with a version, remembers who asked; TLS and certificates of its own making when
    it has a folder."""

    def __init__(self, folder: Path | None = None):
        self.asked: list[str] = []
        self.clients: list[int] = []  # the port of who asked
        self.last: socket.socket  # the connection of the last question
        self.broken = 0  # so many answers end in the middle
        server = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self):
                server.asked.append(self.headers.get("authorization", ""))
                server.clients.append(self.client_address[1])
                server.last = self.connection
                body = b'{"gitVersion": "v1.99.0"}'
                self.send_response(200)
                self.send_header("content-length", str(len(body) + (server.broken > 0)))
                self.end_headers()
                self.wfile.write(body)
                server.broken -= 1

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        if folder:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
            tls.load_verify_locations(folder / "tls.crt")
            tls.verify_mode = ssl.CERT_REQUIRED
            self.http.socket = tls.wrap_socket(self.http.socket, server_side=True)
        self.port = self.http.server_address[1]
        self.address = f"{'https' if folder else 'http'}://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def plain() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """One for `api.test`, which signs itself; it serves as the client's, too."""
    folder = tmp_path_factory.mktemp("certificates")
    argv = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    argv += ["-subj", "/CN=api.test", "-addext", "subjectAltName=DNS:api.test"]
    argv += ["-keyout", folder / "tls.key", "-out", folder / "tls.crt"]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    return folder


def kubeconfig(
    path: Path, server: str, *contexts: str, current: str = "", cluster: dict | None = None, **user
) -> Path:
    """Each context has a user of its name, whose token is its name unless another credential is
    given."""
    body = {
        "current-context": current or contexts[0],
        "clusters": [{"name": "c", "cluster": {"server": server, **(cluster or {})}}],
        "users": [{"name": name, "user": user or {"token": name}} for name in contexts],
        "contexts": [
            {"name": n, "context": {"cluster": "c", "user": n, "namespace": f"of-{n}"}}
            for n in contexts
        ],
    }
    path.write_text(json.dumps(body))
    return path


@pytest.fixture
def configured(tmp_path, plain, monkeypatch) -> Server:
    """Told by KUBECONFIG."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", plain.address, "a")))
    return plain


def test_the_first_file_that_names_a_thing_counts(tmp_path, plain, monkeypatch):
    first = kubeconfig(tmp_path / "one", plain.address, "a", "b", current="b")
    second = kubeconfig(tmp_path / "two", "http://127.0.0.1:1", "b", "z", current="z")
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'absent'}:{first}:{second}")
    assert (Cluster().version(), Cluster().namespace) == ("v1.99.0", "of-b")
    assert (Cluster("a").version(), Cluster("a", "mine").namespace) == ("v1.99.0", "mine")
    assert plain.asked == ["Bearer b", "Bearer a"]
    with refusal(r"no context 'aa' in the kubeconfig; did you mean 'a'", Exit.CONFIG):
        Cluster("aa").version()


@pytest.mark.parametrize("config_text", ["", "a: [", "clusters: 7", "{}", "current-context: x"])
def test_no_usable_kubeconfig_is_no_cluster(tmp_path, config_text):
    path = tmp_path / "config"
    path.write_text(config_text)
    with refusal("no Kubernetes cluster is configured", Exit.CAPACITY):
        access(None, {"KUBECONFIG": str(path)})


@pytest.mark.parametrize("inline", [True, False])
def test_certificates_of_both_sides(tmp_path, certificates, inline, monkeypatch):
    """They are in the kubeconfig itself or in files beside it; the server's name is checked against
    its certificate."""
    server = Server(certificates)
    if inline:
        crt, key = (
            base64.b64encode((certificates / f"tls.{k}").read_bytes()).decode()
            for k in ("crt", "key")
        )
        ours = {"certificate-authority-data": crt}
        user = {"client-certificate-data": crt, "client-key-data": key}
    else:
        path = str(certificates / "tls.crt")
        ours = {"certificate-authority": path}
        user = {"client-certificate": path, "client-key": "tls.key"}
        (tmp_path / "tls.key").write_bytes((certificates / "tls.key").read_bytes())
    scratch_dir = tmp_path / "kept"
    scratch_dir.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch_dir))
    path = kubeconfig(
        tmp_path / "config",
        server.address,
        "a",
        cluster={**ours, "tls-server-name": "api.test"},
        **user,
    )
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert Cluster().version() == "v1.99.0"
    assert not list(scratch_dir.iterdir())  # a key is nowhere left behind
    kubeconfig(path, server.address, "a", cluster=ours, **user)
    with refusal("certificate", Exit.SECURITY):
        Cluster().version()
    server.http.shutdown()


def test_a_pods_own_account(tmp_path, certificates, monkeypatch):
    certificate = (certificates / "tls.crt").read_text()
    for name, content in {"token": "first\n", "namespace": "llm", "ca.crt": certificate}.items():
        (tmp_path / name).write_text(content)
    environ = {
        "KUBECONFIG": str(tmp_path / "none"),
        "KUBERNETES_SERVICE_HOST": "::1",
        "KUBERNETES_SERVICE_PORT": "443",
    }
    account = access(None, environ, tmp_path)
    assert (account.host, account.namespace) == ("https://[::1]:443", "llm")
    assert account.headers() == {"authorization": "Bearer first"}
    (tmp_path / "token").write_text("second")
    assert account.headers() == {"authorization": "Bearer first"}
    monkeypatch.setattr("orchestrator.backends.kubernetes.api.access._TOKEN_S", -1.0)
    assert account.headers() == {"authorization": "Bearer second"}


def test_an_answer_that_breaks_off_is_asked_for_again(configured, monkeypatch):
    """It is one line when it goes on; a body that stopped half-way ended the command with a
    traceback."""
    configured.broken = 1
    assert Cluster().version() == "v1.99.0"
    configured.broken = 1 << 30
    monkeypatch.setattr("orchestrator.backends.kubernetes.api.client._RETRY_PAUSES_S", (0.0,))
    with refusal("no answer from the cluster", Exit.CAPACITY):
        Cluster().version()


@pytest.mark.process
def test_a_credential_plugin_is_asked_through_the_kubernetes_package(tmp_path, plain, monkeypatch):
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "made"},
    }
    plugin = {"command": sys.executable, "args": ["-c", f"print('''{json.dumps(credential)}''')"]}
    user = {"exec": {**plugin, "apiVersion": credential["apiVersion"], "interactiveMode": "Never"}}
    monkeypatch.setenv(
        "KUBECONFIG", str(kubeconfig(tmp_path / "config", plain.address, "a", **user))
    )
    code = (
        "from orchestrator.backends.kubernetes.api.client import"
        " Cluster\nprint(Cluster().version())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "v1.99.0", done.stderr
    assert plain.asked == ["Bearer made"]


@pytest.mark.process
def test_tokens_do_without_the_kubernetes_package(configured, monkeypatch):
    """It takes longer to import than a job takes to plan. Nor is the planner there for who only
    looks at runs."""
    code = (
        "import sys\nfrom orchestrator.backends.kubernetes.backend import"
        " Cluster\nCluster().version()\nsys.exit(bool({'kubernetes', 'yaml', 'numpy'} &"
        " set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_through_a_proxy(tmp_path, plain, monkeypatch):
    """The proxy is asked for what only it can reach; the test's server plays it."""
    path = kubeconfig(
        tmp_path / "config", "http://api.test:6443", "a", cluster={"proxy-url": plain.address}
    )
    monkeypatch.setenv("KUBECONFIG", str(path))
    cluster = Cluster()
    plain.broken = 1
    assert [cluster.version() for _ in range(2)] == ["v1.99.0"] * 2
    assert plain.asked == ["Bearer a"] * 3


def test_connections_are_used_again_until_the_server_has_closed_them(configured, monkeypatch):
    """One that was closed meanwhile is not asked: a POST on it could not be sent again."""
    configured.http.RequestHandlerClass.protocol_version = "HTTP/1.1"
    cluster = Cluster()
    monkeypatch.setattr("orchestrator.backends.kubernetes.api.client._RETRY_PAUSES_S", ())
    assert [cluster.version() for _ in range(3)] == ["v1.99.0"] * 3
    assert len(set(configured.clients)) == 1
    for _ in range(3):
        configured.last.shutdown(socket.SHUT_RDWR)
        assert cluster.version() == "v1.99.0"
    assert len(set(configured.clients)) == 4


def test_a_large_object_may_take_its_time_over_a_slow_link(configured, monkeypatch):
    """The limit for connecting ended an upload that it outlasted."""

    def do_POST(self):
        time.sleep(1.0)
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    monkeypatch.setattr(configured.http.RequestHandlerClass, "do_POST", do_POST, raising=False)
    monkeypatch.setattr("orchestrator.backends.kubernetes.api.transport._CONNECT_S", 0.2)
    chunk = {"kind": "ConfigMap", "apiVersion": "v1", "data": {"x": "y" * 20_000_000}}
    assert Cluster(None, "n").create(chunk) == {"gitVersion": "v1.99.0"}


@pytest.mark.parametrize("complete", [True, False])
def test_a_log_is_read_as_it_is_written(configured, monkeypatch, complete):
    """It comes in chunks that do not end where lines end; a connection that breaks off ends it."""
    seen = threading.Event()

    def do_GET(self):
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"6\r\none\ntw\r\n")
        assert seen.wait(10)
        self.wfile.write(
            b"4\r\no\nth\r\n" + (b"3\r\nree\r\n0\r\n\r\n" if complete else b"9\r\nree")
        )
        self.close_connection = not complete

    configured.http.RequestHandlerClass.do_GET = do_GET
    configured.http.RequestHandlerClass.protocol_version = "HTTP/1.1"
    lines = Cluster().log("p", follow=True)
    assert next(lines) == "one"
    seen.set()
    assert list(lines) == ["two", "three"]


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_requests_at_once_give_results_in_order_and_a_failure_when_all_have_ended(failing):
    begun = threading.Barrier(3)
    done = []

    def call(index: int) -> int:
        begun.wait(10)
        if index == failing:
            raise KeyError(index)
        time.sleep(0.05)
        done.append(index)
        return index

    calls = [lambda index=index: call(index) for index in range(3)]
    if failing is None:
        assert gather(calls) == [0, 1, 2]
        return
    with pytest.raises(KeyError):
        gather(calls)
    assert sorted(done) == [index for index in range(3) if index != failing]
