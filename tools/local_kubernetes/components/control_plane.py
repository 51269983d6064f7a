"""etcd, API server, controllers, scheduler, KubeRay and DNS as processes of this machine."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from http import HTTPStatus

from local_kubernetes.components.certificates import Authority
from local_kubernetes.components.short_crd import short_crd
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.place import Place
from local_kubernetes.machine.processes import Processes
from local_kubernetes.machine.shell import PROGRAM_S, wait_until
from local_kubernetes.parts.build import Parts

_USUAL_API_PORT = 6443
# Controllers of the old Endpoints API. Clusters with simulated nodes do not need them, because EndpointSlices are
# enough there.
_OF_OLD_ENDPOINTS = ("-endpoints-controller", "-endpointslice-mirroring-controller")


class ControlPlane:
    """Starts the control plane. `address`: the bridge's address for a cluster with nodes, else 127.0.0.1."""

    def __init__(self, place: Place, parts: Parts, processes: Processes, *, address: str) -> None:
        self._place = place
        self._parts = parts
        self._processes = processes
        self._address = address
        self._has_nodes = address != "127.0.0.1"
        self.server = f"https://{address}:{place.port(_USUAL_API_PORT)}"
        self.authority = Authority(place.state / "certificates")
        admin = self.authority.issue("admin", "/O=system:masters/CN=admin")
        self.authority.kubeconfig(place.kubeconfig, self.server, admin)
        self._kubectl = Kubectl(place.kubeconfig)

    def ensure_api(self) -> None:
        """Starts etcd, the API server and the controllers, except those that run already. Waits until all work."""
        place = self._place
        client, peer = (f"http://127.0.0.1:{place.port(port)}" for port in (2379, 2380))
        self._component(
            "etcd",
            data_dir=place.state / "etcd",
            unsafe_no_fsync="true",
            # the default of 2 GiB is too small for 10,000 services with all versions of the last five minutes
            quota_backend_bytes=8 << 30,
            listen_client_urls=client,
            advertise_client_urls=client,
            listen_peer_urls=peer,
            initial_advertise_peer_urls=peer,
            initial_cluster=f"default={peer}",
        )
        dns = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
        names = [f"DNS:{name}" for name in dns]
        names += [f"IP:{ip}" for ip in (place.bridge_ip, place.api_service_ip, "127.0.0.1")]
        serving = self.authority.issue("kube-apiserver", "/CN=kube-apiserver", names)
        to_kubelets = self.authority.issue("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client")
        accounts = self.authority.signing_key("service-accounts")
        self._component(
            "kube-apiserver",
            etcd_servers=client,
            bind_address=self._address,
            # Without nodes there is no endpoint of the `kubernetes` Service, because the API server refuses a loopback
            # address.
            **({"advertise_address": self._address} if self._has_nodes else {"endpoint_reconciler_type": "none"}),
            secure_port=place.port(_USUAL_API_PORT),
            authorization_mode="Node,RBAC",
            allow_privileged="true",
            service_cluster_ip_range=place.service_cidr,
            service_account_issuer="https://kubernetes.default.svc",
            service_account_key_file=accounts.certificate,
            service_account_signing_key_file=accounts.key,
            tls_cert_file=serving.certificate,
            tls_private_key_file=serving.key,
            client_ca_file=self.authority.ca.certificate,
            kubelet_client_certificate=to_kubelets.certificate,
            kubelet_client_key=to_kubelets.key,
            kubelet_preferred_address_types="InternalIP",
            profiling="false",
        )
        self._wait("the API server", lambda: self._kubectl.succeeds("get", "--raw", "/readyz"), "kube-apiserver")
        self._component(
            "kube-controller-manager",
            kubeconfig=self.kubeconfig("kube-controller-manager", "/CN=system:kube-controller-manager"),
            use_service_account_credentials="true",
            root_ca_file=self.authority.ca.certificate,
            service_account_private_key_file=accounts.key,
            controllers=",".join(("*", *(() if self._has_nodes else _OF_OLD_ENDPOINTS))),
            node_monitor_grace_period="20s",  # the default of 50 s would make tests of a lost node longer
            leader_elect="false",
            secure_port=0,
        )
        self._wait(
            "the controllers",
            lambda: self._kubectl.succeeds("get", "serviceaccount", "default"),
            "kube-controller-manager",
        )

    def ensure_kuberay(self) -> None:
        if not self._processes.is_alive("kuberay"):
            # The CRDs come first, because KubeRay exits when they do not exist.
            self._apply_kinds_of_kuberay()
            # `kubectl wait` fails while a CRD's conditions are null. Conditions of a new CRD are null at first.
            kinds = ("wait", "--for=condition=Established", "crd", "--all", "--timeout=10s")
            self._wait("the kinds of KubeRay", lambda: self._kubectl.succeeds(*kinds), "kube-apiserver")
        self._processes.ensure(
            "kuberay",
            self._parts.kuberay,
            f"--kubeconfig={self._place.kubeconfig}",
            "--enable-leader-election=false",
            f"--metrics-addr=127.0.0.1:{self._place.port(8080)}",
            f"--health-probe-bind-address=127.0.0.1:{self._place.port(8082)}",
            "--log-stdout-encoder=console",
        )
        self._wait("KubeRay", self._kuberay_is_ready, "kuberay")

    def _apply_kinds_of_kuberay(self) -> None:
        manifests = sorted(self._parts.kuberay_crds.glob("*.yaml"))
        text = "---\n".join(short_crd(path.read_text(), has_fields="rayclusters" in path.name) for path in manifests)
        folder = self._place.state / "manifests"
        folder.mkdir(exist_ok=True)
        (folder / "kuberay.yaml").write_text(text)
        # Applied server-side, because client-side apply stores a copy of the manifest in an annotation. The manifest of
        # RayCluster exceeds an annotation's size.
        apply = ("apply", "--server-side", "--force-conflicts", "--filename", folder / "kuberay.yaml")
        self._kubectl(*apply, timeout_s=PROGRAM_S)

    def ensure_scheduler(self) -> None:
        self._component(
            "kube-scheduler",
            kubeconfig=self.kubeconfig("kube-scheduler", "/CN=system:kube-scheduler"),
            leader_elect="false",
            secure_port=0,
        )

    def ensure_dns(self) -> None:
        """Makes names of Services resolve in pods. CoreDNS runs outside of pods, so a lost node never stops it."""
        port = self._place.port(53)
        corefile = self._place.state / "Corefile"
        config = (
            f".:{port} {{\n"
            "  errors\n"
            f"  kubernetes cluster.local {self._place.pod_cidr} {{\n    kubeconfig {self._place.kubeconfig}\n  }}\n"
            "  cache 5\n"
            "}\n"
        )
        corefile.write_text(config)
        self._processes.ensure("coredns", self._parts.coredns, "-conf", corefile, config=config)
        # The Service selects no pods. Instead an EndpointSlice with the Service's label has CoreDNS's address.
        ports = [{"name": name, "protocol": name.upper()} for name in ("udp", "tcp")]
        self._kubectl.apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "kube-dns", "namespace": "kube-system"},
                "spec": {"clusterIP": self._place.dns_service_ip, "ports": [one | {"port": 53} for one in ports]},
            },
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": "kube-dns-host",
                    "namespace": "kube-system",
                    "labels": {"kubernetes.io/service-name": "kube-dns"},
                },
                "addressType": "IPv4",
                "ports": [one | {"port": port} for one in ports],
                "endpoints": [{"addresses": [self._place.bridge_ip], "conditions": {"ready": True}}],
            },
        )

    def kubeconfig(self, user: str, subject: str) -> str:
        """Writes a kubeconfig for a user of the cluster and returns its path."""
        path = self._place.state / "kubeconfigs" / user
        path.parent.mkdir(exist_ok=True)
        return str(self.authority.kubeconfig(path, self.server, self.authority.issue(user, subject)))

    def _component(self, name: str, **flags: object) -> None:
        words = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
        self._processes.ensure(name, self._parts.kube, name, *words)

    def _kuberay_is_ready(self) -> bool:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(f"http://127.0.0.1:{self._place.port(8082)}/readyz", timeout=5) as answer:
                return bool(answer.status == HTTPStatus.OK)
        except OSError:
            return False

    def _wait(self, what: str, is_so: Callable[[], bool], process: str) -> None:
        def is_so_with_all_alive() -> bool:
            if is_so():
                return True
            self._processes.expect_all_alive()  # all processes must be alive, or the wait cannot succeed
            return False

        wait_until(what, is_so_with_all_alive, PROGRAM_S, hint=f"its log is {self._processes.log(process)}")
