"""Finds the way to the API server: a kubeconfig, or the account of the pod that this process runs
in.

This module reads tokens, client certificates and a pod's own account itself; it leaves credential
plugins, providers and proxies to the kubernetes package. That saves 0.36 s of processor time in
every command: any module of that package (37.0) loads the models of every API, 430 ms, while this
module and urllib3 take 70.
"""

from __future__ import annotations

import base64
import contextlib
import os
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec import Struct, field

from orchestrator.config import bounded_yaml
from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from .transport import Transport

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_S = 60.0  # a pod's token is renewed, so it is read again after this long
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


class _HasName(Protocol):
    name: str


T = TypeVar("T", bound=_HasName)


class Access(Struct, frozen=True):
    host: str  # https://name:port
    namespace: str  # the context's, or the pod's own
    transport: Transport
    headers: Callable[[], Mapping[str, str]]  # credentials, valid now
    settings: Callable[[], Any]  # the same as a kubernetes.client.Configuration; OrchError (76)


class Unusable(Exception):
    """No cluster can be reached; the message is the reason."""


def access(
    context: str | None,
    environ: Mapping[str, str],
    account: Path = _ACCOUNT,
) -> Access:
    """Returns access to the kubeconfig's context of that name, to its current one, or to the
    cluster that this pod runs in.

    OrchError: 65 for a context that the kubeconfig lacks, 76 if no cluster is configured.
    """
    try:
        kubeconfig = _kubeconfig(environ)
        if kubeconfig.contexts or context:
            name = context or kubeconfig.current_context
            chosen = _named(kubeconfig.contexts, name)
            if chosen is None and context:
                names = [named.name for named in kubeconfig.contexts]
                hint = did_you_mean(context, names)
                message = f"no context {context!r} in the kubeconfig; {hint}"
                raise OrchError(message, Exit.CONFIG)
            if chosen is not None:
                return _of_context(kubeconfig, chosen, environ)
        return _of_pod(environ, account)
    # ssl.SSLError is an OSError
    except (Unusable, OSError, ValueError, msgspec.MsgspecError) as error:
        message = (
            "no Kubernetes cluster is configured: no usable kubeconfig (KUBECONFIG), and this is"
            " no pod"
        )
        reason = str(error).splitlines() or [type(error).__name__]
        raise OrchError(f"{message} ({reason[0]})", Exit.CAPACITY) from None


# ------------------------------------------------------------------------------------------
#     kubeconfig


class _Cluster(Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""


class _User(Struct, rename="kebab"):
    token: str = ""
    token_file: str = field(default="", name="tokenFile")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    exec: Any = None
    auth_provider: Any = None
    username: str = ""


class _Context(Struct):
    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _NamedCluster(Struct):
    name: str
    cluster: _Cluster
    folder: str = ""


class _NamedUser(Struct):
    name: str
    user: _User | None = None
    folder: str = ""


class _NamedContext(Struct):
    name: str
    context: _Context


class _Kubeconfig(Struct, rename="kebab"):
    clusters: list[_NamedCluster] | None = None
    users: list[_NamedUser] | None = None
    contexts: list[_NamedContext] | None = None
    current_context: str | None = None


class _Merged(Struct):
    """Several kubeconfig files as one: the first file that names something counts, as in
    kubectl."""

    clusters: list[_NamedCluster] = []
    users: list[_NamedUser] = []
    contexts: list[_NamedContext] = []
    current_context: str = ""


def _files(environ: Mapping[str, str]) -> str:
    return environ.get("KUBECONFIG") or "~/.kube/config"


def _kubeconfig(environ: Mapping[str, str]) -> _Merged:
    merged = _Merged([], [], [])
    for name in filter(None, _files(environ).split(os.pathsep)):
        path = Path(os.path.expanduser(name))
        if not path.is_file():
            continue
        kubeconfig = _decode(path.read_bytes())
        for entry in (*(kubeconfig.clusters or ()), *(kubeconfig.users or ())):
            entry.folder = str(path.parent)
        merged.clusters += kubeconfig.clusters or ()
        merged.users += kubeconfig.users or ()
        merged.contexts += kubeconfig.contexts or ()
        merged.current_context = merged.current_context or kubeconfig.current_context or ""
    return merged


def _decode(raw: bytes) -> _Kubeconfig:
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(raw, type=_Kubeconfig, strict=False)
    import yaml

    try:
        document = bounded_yaml.load(
            raw,
            bounded_yaml.MOST_VALUES,
            getattr(yaml, "CSafeLoader", yaml.SafeLoader),
        )
    except OrchError as error:
        raise Unusable(f"the kubeconfig cannot be read: {error.message}") from None
    except yaml.YAMLError as error:
        raise Unusable(f"the kubeconfig is not YAML: {error}") from None
    return msgspec.convert(document or {}, type=_Kubeconfig, strict=False)


def _named(entries: Sequence[T], name: str) -> T | None:
    return next((entry for entry in entries if entry.name == name), None)


def _of_context(
    kubeconfig: _Merged,
    chosen: _NamedContext,
    environ: Mapping[str, str],
) -> Access:
    context = chosen.context
    named = _named(kubeconfig.clusters, context.cluster)
    owner = _named(kubeconfig.users, context.user)
    if named is None or not named.cluster.server:
        raise Unusable(f"context {chosen.name} names no cluster with a server")
    cluster = named.cluster
    user = owner.user if owner and owner.user else _User()
    namespace = context.namespace or "default"
    proxied = cluster.proxy_url or any(map(environ.get, _PROXIES))
    if user.exec or user.auth_provider or user.username or proxied:
        return _by_package(chosen.name, namespace, environ)
    from .transport import connect  # loads urllib3, which only requests need

    host = cluster.server.rstrip("/")
    tls = _tls(named, owner, user) if host.startswith("https") else None
    token = user.token
    if owner and user.token_file and not token:
        token = _file(owner.folder, user.token_file).read_text().strip()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    transport = connect(host, tls, cluster.tls_server_name)
    return Access(
        host=host,
        namespace=namespace,
        transport=transport,
        headers=lambda: headers,
        settings=lambda: _package_settings(chosen.name, environ),
    )


def _file(folder: str, name: str) -> Path:
    """Resolves a file name in a kubeconfig, which is relative to the kubeconfig's own folder."""
    return Path(folder, name)


def _tls(named: _NamedCluster, owner: _NamedUser | None, user: _User) -> ssl.SSLContext:
    cluster = named.cluster
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if cluster.insecure_skip_tls_verify:
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    elif cluster.certificate_authority_data:
        tls.load_verify_locations(
            cadata=base64.b64decode(cluster.certificate_authority_data).decode()
        )
    elif cluster.certificate_authority:
        tls.load_verify_locations(_file(named.folder, cluster.certificate_authority))
    else:
        tls.load_default_certs()
    if not (user.client_certificate_data or user.client_certificate):
        return tls
    import tempfile

    folder = owner.folder if owner else ""
    with tempfile.TemporaryDirectory() as temporary:  # ssl reads certificates only from files
        certificate = _credential_file(
            folder,
            user.client_certificate_data,
            user.client_certificate,
            Path(temporary, "certificate"),
        )
        key = _credential_file(
            folder,
            user.client_key_data,
            user.client_key,
            Path(temporary, "key"),
        )
        if certificate is None:
            raise Unusable("a client key without its certificate")
        tls.load_cert_chain(certificate, key)
    return tls


def _credential_file(folder: str, data: str, name: str, written: Path) -> Path | None:
    """Returns the file of a certificate or key; inline data is first written to `written`."""
    if data:
        written.write_bytes(base64.b64decode(data))
        return written
    return _file(folder, name) if name else None


# ------------------------------------------------------------------------- a pod's account, plugins


def _of_pod(environ: Mapping[str, str], account: Path) -> Access:
    host = environ.get("KUBERNETES_SERVICE_HOST")
    port = environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise Unusable("KUBERNETES_SERVICE_HOST is not set")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.load_verify_locations(account / "ca.crt")
    cached_headers: list[tuple[float, dict[str, str]]] = []

    def headers() -> Mapping[str, str]:
        if not cached_headers or time.monotonic() > cached_headers[0][0] + _TOKEN_S:
            token = (account / "token").read_text().strip()
            cached_headers[:] = [(time.monotonic(), {"authorization": f"Bearer {token}"})]
        return cached_headers[0][1]

    headers()
    name = f"[{host}]" if ":" in host else host
    namespace = (account / "namespace").read_text().strip()
    address = f"https://{name}:{port}"
    from .transport import connect

    return Access(
        host=address,
        namespace=namespace,
        transport=connect(address, tls),
        headers=headers,
        settings=lambda: _package_settings(None, environ),
    )


def _by_package(context: str, namespace: str, environ: Mapping[str, str]) -> Access:
    """Builds access through the kubernetes package, which supports plugins and renews what
    expires."""
    from kubernetes import client

    from .transport import Transport

    settings = _package_settings(context, environ)

    def headers() -> Mapping[str, str]:
        in_headers = [
            auth for auth in settings.auth_settings().values() if auth.get("in") == "header"
        ]
        return {auth["key"]: auth["value"] for auth in in_headers if auth.get("value")}

    transport = Transport(settings.host, client.ApiClient(settings).rest_client.pool_manager)
    return Access(
        settings.host,
        namespace,
        transport,
        headers,
        lambda: settings,
    )


def _package_settings(context: str | None, environ: Mapping[str, str]) -> Any:
    """Returns the kubernetes.client.Configuration of a context, or, for None, of the cluster that
    this pod runs in. Unusable if there is none."""
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    settings = client.Configuration()
    try:
        if context is None:
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(_files(environ), context, client_configuration=settings)
    except (ConfigException, TypeError) as error:
        raise Unusable(str(error)) from None
    return settings
