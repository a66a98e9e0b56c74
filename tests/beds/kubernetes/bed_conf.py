"""What the daemons of the test cluster read: pure text from a few paths and addresses."""

from __future__ import annotations

import json
from pathlib import Path

# the bed's bridge: API server, DNS, kubelets; a name space of its own keeps beds apart
HOST = "10.77.0.1"
PODS = "10.77.0.0/16"
SERVICES = "10.96.0.0/16"
DNS_DOMAIN = "cluster.local"
API = f"https://{HOST}:6443"
TOKENS = {"admin": "admin-token", "user": "user-token"}


def tokens_csv() -> str:
    return f'{TOKENS["admin"]},admin,admin,"system:masters"\n{TOKENS["user"]},user,user\n'


def kubeconfig(user: str = "admin", namespace: str = "default", server: str = API) -> str:
    """JSON, which is YAML. The server's certificate is its own."""
    context = {"cluster": "bed", "user": user, "namespace": namespace}
    current = {"current-context": "bed"}
    return _config(
        "v1", "Config", contexts=[{"name": "bed", "context": context}], **current,
        clusters=[{"name": "bed", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        users=[{"name": user, "user": {"token": TOKENS.get(user, user)}}],
    )  # fmt: skip


def _config(version: str, kind: str, **fields: object) -> str:
    return json.dumps({"apiVersion": version, "kind": kind, **fields}, indent=1)


def node_folder(home: Path, index: int) -> Path:
    return home / f"node-{index}"


def containerd_toml(node: Path) -> str:
    return f"""version = 2
root = "{node}/containerd"
state = "{node}/run"
[grpc]
  address = "{node}/containerd.sock"
[ttrpc]
  address = "{node}/containerd.ttrpc"
[debug]
  level = "warn"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "orch.test/pause:1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  max_concurrent_downloads = 1
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{node}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "overlayfs"
  default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = false
  Root = "{node}/runc"
[plugins."io.containerd.internal.v1.opt"]
  path = "{node}/opt"
"""


def cni_conflist(node: Path, index: int) -> str:
    """One bridge for all nodes of the bed; each node gives out addresses of its own range."""
    ranges = [
        [
            {
                "subnet": PODS,
                "rangeStart": f"10.77.{index + 1}.2",
                "rangeEnd": f"10.77.{index + 1}.250",
            }
        ]
    ]
    ranges[0][0]["gateway"] = HOST
    ipam = {
        "type": "host-local",
        "ranges": ranges,
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(node / "ipam"),
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": False,
        "ipMasq": False,
        "hairpinMode": True,
    }
    return json.dumps(
        {"cniVersion": "0.4.0", "name": "bed", "plugins": [{**bridge, "ipam": ipam}]}, indent=1
    )


def kubelet_yaml(node: Path, index: int) -> str:
    return _config(
        "kubelet.config.k8s.io/v1beta1", "KubeletConfiguration", address=HOST, port=10250 + index, healthzPort=0,
        authentication={"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        authorization={"mode": "AlwaysAllow"}, cgroupDriver="cgroupfs", cgroupsPerQOS=False, failCgroupV1=False,
        enforceNodeAllocatable=[], failSwapOn=False, makeIPTablesUtilChains=False, registerWithTaints=[], maxPods=50,
        localStorageCapacityIsolation=False, evictionHard={"memory.available": "50Mi"},
        imageGCHighThresholdPercent=99, imageGCLowThresholdPercent=98, clusterDNS=[HOST], clusterDomain=DNS_DOMAIN,
        resolvConf=str(node.parent / "resolv.conf"), podLogsDir=str(node / "pod-logs"),
        containerRuntimeEndpoint=f"unix://{node}/containerd.sock",
        nodeStatusUpdateFrequency="4s", nodeStatusReportFrequency="20s", syncFrequency="10s",
    )  # fmt: skip


def corefile(home: Path) -> str:
    return f"""{DNS_DOMAIN}:53 {{
  bind {HOST}
  errors
  kubernetes {DNS_DOMAIN} {{
    kubeconfig {home}/admin.kubeconfig
    ttl 1
  }}
}}
"""


def proxy_yaml(home: Path) -> str:
    return _config(
        "kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration", mode="iptables", clusterCIDR=PODS,
        clientConnection={"kubeconfig": f"{home}/admin.kubeconfig"}, hostnameOverride="node-0",
        conntrack={"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        healthzBindAddress="", metricsBindAddress="127.0.0.1:10249",
    )  # fmt: skip


def apiserver_flags(home: Path, gangs: bool = False) -> list[str]:
    """`gangs`: with the Workload API, which is alpha."""
    pki = home / "pki"
    alpha = [
        "--feature-gates=GenericWorkload=true",
        "--runtime-config=scheduling.k8s.io/v1alpha1=true",
    ]
    return [
        *(alpha if gangs else ()),
        "--etcd-servers=http://127.0.0.1:2379", f"--cert-dir={pki}", f"--bind-address={HOST}", "--secure-port=6443",
        f"--advertise-address={HOST}", f"--service-cluster-ip-range={SERVICES}", "--watch-cache=true", "--v=1",
        f"--service-account-key-file={pki}/sa.pub", f"--service-account-signing-key-file={pki}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc", f"--token-auth-file={home}/tokens.csv",
        "--authorization-mode=Node,RBAC", "--allow-privileged=true", "--max-requests-inflight=800",
        "--kubelet-preferred-address-types=InternalIP",
    ]  # fmt: skip


def manager_flags(
    home: Path, nodes_have_kubelets: bool = True, own_rates: bool = False
) -> list[str]:
    """`own_rates`: requests a second as where nobody has raised Kubernetes' own limit, 20 for each
    controller."""
    silence = (
        "50s" if nodes_have_kubelets else "24h"
    )  # after which a node is given up; busy ones are late
    return [
        f"--kubeconfig={home}/admin.kubeconfig", f"--service-account-private-key-file={home}/pki/sa.key",
        f"--root-ca-file={home}/pki/apiserver.crt", "--controllers=*,-nodeipam,-cloud-node-lifecycle",
        *(() if own_rates else ("--kube-api-qps=500", "--kube-api-burst=1000")), "--leader-elect=false",
        f"--node-monitor-grace-period={silence}", "--node-monitor-period=2s", "--secure-port=0",
    ]  # fmt: skip


def scheduler_yaml(home: Path, own_rates: bool = False) -> str:
    """`own_rates`: as where nobody has raised Kubernetes' own limit, 50."""
    rates = {} if own_rates else {"qps": 500, "burst": 1000}
    return _config(
        "kubescheduler.config.k8s.io/v1", "KubeSchedulerConfiguration", leaderElection={"leaderElect": False},
        clientConnection={"kubeconfig": f"{home}/admin.kubeconfig", **rates},
    )  # fmt: skip
